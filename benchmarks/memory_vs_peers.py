# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
"""A training step's memory, predicted without a GPU and then measured: ninety steps of fifteen models, and four peers.

Run it on a CUDA machine with `gpucourse record benchmarks/memory_vs_peers.py`; chapter 09 shows the tables.

Predictions come from processes that see no GPU, on the torch that measures. The peers are torch's own `MemTracker`,
mlsysim's training memory (told whether everything is computed again; for transformers only), what accelerate's
`estimate-memory` prints for Adam, and 16 bytes a parameter. A measured step begins with an empty allocator, in one
process for all. The largest microbatch under a hard cap is found by bisection, each try from an empty allocator; the
predicted one is tried, too.

A third of the models, by a rule fixed beforehand (`memory_cases/models.py`), is not looked at while the predictor is
tuned: the figures that lead are theirs. How long a prediction takes on two cores, with the CPU build of torch, is
measured apart, by `memory_cases/on_two_cores.py`.

Each answer is kept in a file as it comes; a run that was cut off goes on from there. `GPUCOURSE_PARTIAL` names the
folder, the system's temporary one by default.
"""

# %%
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

HERE = Path(globals().get("__file__", "memory_vs_peers.py")).resolve().parent
sys.path.insert(0, str(HERE))

from memory_cases.cases import CAP_BYTES, CASES, SEARCHED, WAYS  # noqa: E402
from memory_cases.models import KEPT_OUT, batches_of, described  # noqa: E402
from memory_cases.workers import Store, Worker, answered, code_sha256, in_background  # noqa: E402

from gpucourse.plots import memory_peers as draw  # noqa: E402
from gpucourse.recording import recorded  # noqa: E402

TIME_S = 400.0  # for the whole run; what has not been asked by then says so
LIMIT_S = {"predict": 90.0, "peers": 150.0, "largest": 200.0, "measure": 60.0, "search": 120.0}


def asked(what, way, samples=None, **more):
    """Write a request to a worker."""
    request = {"do": what, "model": way.model, "way": WAYS[way.model].index(way), **more}
    return request if samples is None else {**request, "samples": samples}


def without_gpu():
    """List what is asked in the background; the peers on the smaller batches only while the device is at work."""
    larger = [(way, samples) for way, samples in CASES if samples == max(batches_of(way.model))]
    smaller = [case for case in CASES if case not in larger]
    return [
        *(asked("largest", way) for way in SEARCHED),
        *(asked("predict", way, samples) for way, samples in CASES),
        *(asked("peers", way, samples) for way, samples in larger),
        *(asked("peers", way, samples, optional=True) for way, samples in smaller),
    ]


def measured_on(worker, store, until):
    """Measure all cases and search the largest microbatches on the device, one after the other."""
    for way, samples in CASES:
        found = answered(worker, store, asked("measure", way, samples), until, LIMIT_S["measure"])
        if "CUDA error" in found.get("error", ""):
            worker.close()  # its context is lost, and with it every later case
    for way in SEARCHED:
        foretold = waited_for(store, asked("largest", way), until)
        peaks = [
            [samples, (store.get(asked("measure", way, samples)) or {}).get("allocated_bytes")]
            for samples in batches_of(way.model)
        ]
        if None in (peak for _, peak in peaks):
            store.put(asked("search", way), {"error": "its two cases were not measured"})
            continue
        said = foretold.get("microbatch")
        request = asked("search", way, peaks=peaks, also=[said] if said else [])
        answered(worker, store, request, until, LIMIT_S["search"])


def waited_for(store, request, until):
    """Wait for an answer that a worker in the background is to give."""
    while (found := store.get(request)) is None and time.monotonic() < until:
        time.sleep(0.2)
    return found or {"error": "no answer in time"}


@recorded(needs_gb=28, pending="its run takes some five minutes on the device and is still to be made")
def memory_vs_peers():
    """Predict, ask the peers, measure; see the module's docstring."""
    began = time.monotonic()
    until = began + TIME_S
    folder = Path(os.environ.get("GPUCOURSE_PARTIAL") or tempfile.gettempdir())
    code = code_sha256()
    store = Store(folder / "memory_vs_peers.jsonl", f"{code} torch {torch.__version__}")
    cores = os.cpu_count() or 2
    count = max(1, cores - 2)  # one is left to the worker that measures, and one to the rest
    measured = threading.Event()
    workers = [lambda: Worker(sees_gpu=False) for _ in range(count)]
    threads = in_background(without_gpu(), store, until, LIMIT_S, workers, measured)
    worker = Worker(sees_gpu=True, threads=2)
    try:
        measured_on(worker, store, until)
    finally:
        worker.close()
        measured.set()
    for thread in threads:
        thread.join(max(1.0, until + 5.0 - time.monotonic()))
    late, not_asked = {"error": "no answer in time"}, {"error": "not asked at this batch: the time was up"}
    cases = [
        {
            **way.as_dict(),
            "samples": samples,
            "predicted": store.get(asked("predict", way, samples)) or late,
            "measured": store.get(asked("measure", way, samples)) or late,
            "peers": store.get(asked("peers", way, samples)) or not_asked,
        }
        for way, samples in CASES
    ]
    searches = [
        {
            **way.as_dict(),
            "predicted": store.get(asked("largest", way)) or late,
            "found": store.get(asked("search", way)) or late,
        }
        for way in SEARCHED
    ]
    return {
        "cases": cases,
        "searches": searches,
        "kept_out": list(KEPT_OUT),
        "what": described(),
        "cap_bytes": CAP_BYTES,
        "code_sha256": code,
        "cores": cores,
        "predicting_at_once": count,
        "seconds": time.monotonic() - began,
    }


# %%
found = memory_vs_peers()
for table in () if found.pending else (draw.goals(found), draw.searches(found), draw.cases(found)):
    print(table.caption)
    widths = [
        max(len(str(cell)) for cell in column) for column in zip(table.header, *table.rows, strict=True)
    ]
    for row in (table.header, *table.rows):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
for reason in () if found.pending else draw.reasons(found):
    print(reason)
print(found.line())
