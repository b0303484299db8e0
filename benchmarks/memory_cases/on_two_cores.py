"""How long a prediction takes on two cores with the CPU build of torch: it needs no GPU, no driver and no CUDA build.

    python benchmarks/memory_cases/on_two_cores.py [OUT.json]

Predicts the larger case of each way to train each model that can be made here, in one process bound to two cores, and
prints a line each: the wall's time and the processor's, which others at work on the machine do not lengthen.
torchvision's compiled operators do not load beside the CPU torch; its models need none of them, so only their names are
declared here.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def main(path: str | None) -> dict[str, Any]:
    """Predict, print, and write the result where a path is given."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    load = os.getloadavg()[0]
    began = time.perf_counter()
    import torch

    from memory_cases.cases import WAYS
    from memory_cases.models import batches_of
    from memory_cases.predicting import predict, told

    declared = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.set_num_threads(2)
    imports_s = time.perf_counter() - began
    rows = []
    for way in (way for ways in WAYS.values() for way in ways):
        samples = max(batches_of(way.model))
        row: dict[str, Any] = {**way.as_dict(), "samples": samples}
        busy = time.process_time()
        try:
            found = predict(way, samples)
        except Exception as error:  # a package that is not here
            row["error"] = told(error)
        else:
            row["cpu_seconds"] = time.process_time() - busy
            row |= {key: found[key] for key in ("seconds", "allocated_bytes", "gpus_visible")}
        rows.append(row)
        print(row["model"], row["precision"], samples, row.get("seconds", row.get("error")), flush=True)
    result = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "imports_s": imports_s,
        "load_before": load,
        "rows": rows,
    }
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
