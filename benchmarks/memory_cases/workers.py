"""Workers in processes of their own, and a store that keeps each answer as it comes."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def code_sha256() -> str:
    """Hash the sources that predict and measure: results of other code are not taken over."""
    texts = [path.read_bytes() for path in sorted(HERE.glob("*.py")) if path.stem != "on_two_cores"]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


class Worker:
    """A process that answers requests one by one; one that died or hung is replaced at the next request.

    Parameters
    ----------
    sees_gpu
        Whether it may use the GPU.
    threads
        For arithmetic on the host.
    command
        What runs; the server beside this file by default.
    """

    def __init__(self, *, sees_gpu: bool, threads: int = 1, command: list[str] | None = None) -> None:
        self.command = command or [sys.executable, str(HERE / "serve.py")]
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if not sees_gpu:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: Any = None

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Give the answer, or an ``error`` that says how the process ended.

        Parameters
        ----------
        request
            Plain data.
        timeout_s
            How long to wait.
        """
        if self.process is None:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=self.environment,
                bufsize=0,
            )
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, timeout_s))
            line = self.process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        if line is None:
            reason = f"no answer within {timeout_s:.0f} s"
        else:
            code = self.process.wait()
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
            reason = f"the worker ended with {code}: {' '.join(last)}"[:300]
        self.close()
        return {"error": reason}

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.errors.close()
            self.process = None


class Store:
    """Answers by request, each written to a file when it comes, so that a run that is cut off can go on.

    Parameters
    ----------
    path
        A file of JSON lines. Lines of other code or another torch are left alone and not used.
    mark
        What must be the same for a line to be used.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self.path, self.mark = path, mark
        self.known: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut off as it was written
            if row.get("mark") == mark and "error" not in row["answer"]:
                self.known[row["key"]] = row["answer"]

    def put(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        """Keep an answer.

        Parameters
        ----------
        request, answer
            Plain data.
        """
        key = key_of(request)
        with self.lock:
            self.known[key] = answer
            with self.path.open("a") as file:
                file.write(json.dumps({"mark": self.mark, "key": key, "answer": answer}) + "\n")

    def get(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Give what is known; None where it is not.

        Parameters
        ----------
        request
            Plain data.
        """
        with self.lock:
            return self.known.get(key_of(request))


def key_of(request: dict[str, Any]) -> str:
    """Name a request by what it asks for; what it merely brings along is left out."""
    return " ".join(str(request[name]) for name in ("do", "model", "way", "samples") if name in request)


def answered(
    worker: Any, store: Store, request: dict[str, Any], until: float, limit_s: float
) -> dict[str, Any]:
    """Take an answer from the store, or ask for it while there is time.

    Parameters
    ----------
    worker
        Has ``ask``.
    store
        Of answers.
    request
        Plain data.
    until
        When the whole run must be over, by `time.monotonic`.
    limit_s
        The longest for this request.
    """
    found = store.get(request)
    if found is None:
        left = until - time.monotonic()
        if left <= 0:
            return {"error": "not asked: the run's time was used up"}
        found = worker.ask(request, min(limit_s, left))
        store.put(request, found)
    return found


def in_background(
    requests: Iterable[dict[str, Any]],
    store: Store,
    until: float,
    limits_s: Mapping[str, float],
    make_workers: list[Callable[[], Any]],
    enough: threading.Event,
) -> list[threading.Thread]:
    """Have the requests answered by several workers, in their order; join the threads to wait for all.

    Parameters
    ----------
    requests
        Plain data.
    store
        Where the answers go.
    until
        As in `answered`.
    limits_s
        The longest for a request, by what it asks to ``do``.
    make_workers
        One function a worker.
    enough
        Once it is set, requests that are marked ``optional`` are no longer asked.
    """
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)

    def work(make: Callable[[], Any]) -> None:
        worker = make()
        try:
            while True:
                request = waiting.get_nowait()
                if request.get("optional") and enough.is_set():
                    continue
                found = answered(worker, store, request, until, limits_s[request["do"]])
                if store.get(request) is None:
                    store.put(request, found)
        except queue.Empty:
            worker.close()

    threads = [threading.Thread(target=work, args=(make,), daemon=True) for make in make_workers]
    for thread in threads:
        thread.start()
    return threads
