"""One worker: reads a request a line, answers a line. Run by `workers.Worker`; what it prints else goes to stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for.

    Parameters
    ----------
    request
        ``do``: "predict", "peers", "largest", "measure" or "search"; ``model`` and ``way`` name the way; ``samples``
        where it is one case.
    """
    from memory_cases.cases import WAYS
    from memory_cases.predicting import told

    way, what = WAYS[request["model"]][request["way"]], request["do"]
    try:
        if what in ("measure", "search"):
            from memory_cases import measuring

            if what == "measure":
                return measuring.measure(way, request["samples"])
            return measuring.largest(way, request["peaks"], request["also"])
        from memory_cases import predicting

        if what == "largest":
            return predicting.largest(way)
        return {"predict": predicting.predict, "peers": predicting.peers}[what](way, request["samples"])
    except Exception as error:  # what fails is a row with its reason
        return {"error": told(error)}


def main() -> None:
    """Answer until there are no more requests."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
