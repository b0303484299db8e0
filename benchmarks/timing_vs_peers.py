# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
"""Every timer against the profiler's record of its own launches, in one run, in alternation.

Run it on a CUDA machine with `gpucourse record benchmarks/timing_vs_peers.py`; chapter 04 shows the table.

A timer is held against what the profiler (CUPTI) saw of *its* launches: the same cache state, the same launch mode
(in a CUDA graph, queued behind other work, one at a time). The truth of one call is the kernel's span, or first
start to last end where a call launches several kernels. Readings and truths alternate, round by round.
"""

# %%
import statistics
import time

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from gpucourse.cuda_events import time_cuda
from gpucourse.recording import recorded

ROUNDS = 5
CALLS = 10  # calls in one profiled stretch
L2_BYTES_FLUSHED = 256 * 2**20  # what triton.testing.do_bench clears


def cases():
    """Give name -> function without arguments, from about 1 µs to about 100 ms on an H200."""

    def rand(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda").to(dtype)

    found = {}
    for label, size in (("1 Ki", 2**10), ("64 Ki", 2**16), ("1 Mi", 2**20), ("16 Mi", 2**24)):
        x, y = rand(size), rand(size)
        found[f"add {label} fp32"] = lambda x=x, y=y: torch.add(x, y)
    wide, rows = rand(2**24), rand(4096, 4096)
    tokens, ones, zeros = rand(8192, 768), torch.ones(768, device="cuda"), torch.zeros(768, device="cuda")
    found["sum 16 Mi fp32"] = lambda: torch.sum(wide)
    found["softmax 4096 x 4096 fp32"] = lambda: torch.softmax(rows, -1)
    found["layer norm 8192 x 768 fp32"] = lambda: F.layer_norm(tokens, (768,), ones, zeros)
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    for label, dtype in (("fp32", torch.float32), ("bf16" if half is torch.bfloat16 else "fp16", half)):
        for width in (256, 1024, 2048, 8192):
            a, b = rand(width, width, dtype=dtype), rand(width, width, dtype=dtype)
            found[f"matmul {width} {label}"] = lambda a=a, b=b: torch.mm(a, b)
    large = rand(13_312, 13_312)
    found["matmul 13312 fp32"] = lambda: torch.mm(large, large)
    layer, batch = torch.nn.Linear(768, 768, device="cuda"), rand(2048, 768)

    def backward():
        layer.zero_grad(set_to_none=True)
        layer(batch).sum().backward()

    found["linear 2048 x 768, forward and backward"] = backward
    side, left, right = torch.cuda.Stream(), rand(1024, 1024), rand(1024, 1024)

    def two_streams():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.mm(left, left)
        torch.mm(right, right)
        torch.cuda.current_stream().wait_stream(side)

    found["two streams, a matmul 1024 fp32 on each"] = two_streams
    return found


def device_records(run):
    """Give (start, end, name) in µs of everything the device ran, and how long the host waited for it in µs."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        waited = (time.perf_counter() - begin) * 1e6
    events = profiled.profiler.kineto_results.events()
    seen = [e for e in events if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0]
    origin = min((e.start_ns() for e in seen), default=0)  # nanoseconds since 1970 do not fit a float
    starts = [(e.start_ns() - origin) / 1e3 for e in seen]
    found = [(start, start + e.duration_ns() / 1e3, e.name()) for start, e in zip(starts, seen, strict=True)]
    return sorted(found), waited


def spans(records, calls):
    """Cut the records into equal calls, and give each call's first start to last end in µs."""
    each = len(records) // calls
    if each == 0 or each * calls != len(records):
        return []  # the profiler dropped some: no truth this time
    parts = [records[i * each : (i + 1) * each] for i in range(calls)]
    return [max(end for _, end, _ in part) - part[0][0] for part in parts]


def captured(call, count):
    """Capture `count` calls into a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def truths(call, long):
    """Give, for each launch mode, a function that has the profiler look at it and returns spans in µs."""
    flush = torch.empty(L2_BYTES_FLUSHED, dtype=torch.int8, device="cuda")
    fills = {name for _, _, name in device_records(flush.zero_)[0]}

    def flushed():
        flush.zero_()
        call()

    def times(what, count):
        return lambda: [what() for _ in range(count)]

    calls = 3 if long else CALLS
    graph, cold = captured(call, calls), captured(flushed, calls)

    def warm_of(run):
        return lambda: spans(device_records(run)[0], calls)

    def cold_of(run):
        return lambda: spans([r for r in device_records(run)[0] if r[2] not in fills], calls)

    return {
        "graph": warm_of(graph.replay),
        "queue": warm_of(times(call, calls)),
        "cold graph": cold_of(cold.replay),
        "cold queue": cold_of(times(flushed, calls)),
        "whole graph": lambda: whole(graph, calls),
    }


def whole(graph, calls):
    """Hold an event pair around a replay against the profiler's record of that same replay, in µs a replay."""
    pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def run():
        torch.cuda._sleep(2_000_000)
        pair[0].record()
        graph.replay()
        pair[1].record()

    records = device_records(run)[0][1:]  # without the spin kernel
    if not records or len(records) % calls:
        return None
    return pair[0].elapsed_time(pair[1]) * 1e3, max(end for _, end, _ in records) - records[0][0]


def single_pair(call):
    """Read one event pair on an idle queue, in µs: what most people write first."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def methods(call, long):
    """Give name -> (cache state, launch mode whose record is its truth, reading in µs)."""
    mode = "queue" if long else "graph"
    found = {
        "time_cuda": ("warm", mode, lambda: time_cuda(call, max_seconds=0.1).median_ms * 1e3),
        "time_cuda, cold": (
            "cold",
            "cold graph",
            lambda: time_cuda(call, l2="cold", max_seconds=0.1).median_ms * 1e3,
        ),
        "one event pair": ("warm", "queue", lambda: statistics.median(single_pair(call) for _ in range(5))),
        "torch.utils.benchmark": (
            "warm",
            "queue",
            lambda: Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.05).median * 1e6,
        ),
    }
    try:
        from triton.testing import do_bench, do_bench_cudagraph
    except ModuleNotFoundError:
        return found
    budget = {"rep": 60 if long else 20, "return_mode": "median"}

    def in_graph():
        with torch.cuda.stream(torch.cuda.Stream()):
            return do_bench_cudagraph(call, **budget) * 1e3

    found["do_bench_cudagraph"] = ("warm", "graph", in_graph)
    found["do_bench"] = ("cold", "cold queue", lambda: do_bench(call, warmup=5, **budget) * 1e3)
    return found


def spin_mhz():
    """Give the multiprocessors' clock in MHz, from the spin kernel's own cycles."""
    torch.cuda._sleep(500_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(1_000_000)
    end.record()
    torch.cuda.synchronize()
    return 1_000_000 / (start.elapsed_time(end) * 1e3)


def compare(call):
    """Give one kernel's rows: each method's readings beside the truths of its own launch mode."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    long = single_pair(call) > 10_000
    ways, looks = methods(call, long), truths(call, long)
    rows = {name: {"readings_us": [], "truths_us": []} for name in ways}
    replays, mhz = [], []
    for _ in range(ROUNDS):
        for name, (_, mode, read) in ways.items():
            seen = looks[mode]()
            rows[name]["truths_us"].append(statistics.median(seen) if seen else None)
            rows[name]["readings_us"].append(read())
            mhz.append(spin_mhz())
        replays.append(looks["whole graph"]())
    begin = time.perf_counter()
    text = str(time_cuda(call))
    default_s = time.perf_counter() - begin
    for name, (cache, mode, _) in ways.items():
        row = rows[name]
        pairs = [(r, t) for r, t in zip(row["readings_us"], row["truths_us"], strict=True) if t is not None]
        errors = [reading - truth for reading, truth in pairs]
        seen = [truth for _, truth in pairs]
        row |= {"cache": cache, "mode": mode, "rounds": len(pairs)}
        row["truth_us"] = statistics.median(seen) if seen else None
        row["error_us"] = statistics.median(errors) if errors else None
        row["truth_spread_us"] = max(seen) - min(seen) if seen else None
    replayed = [pair for pair in replays if pair is not None]
    return {
        "methods": rows,
        "replay_events_us": [pair[0] for pair in replayed],
        "replay_profiler_us": [pair[1] for pair in replayed],
        "default_call_s": default_s,
        "method": text.split("; ")[1] if "; " in text else text,
        "mhz": [min(mhz), max(mhz)],
    }


@recorded(needs_gb=4)
def timing_vs_peers():
    """Run all cases; see the module's docstring for how a row is made."""
    torch.set_float32_matmul_precision("highest")
    return {"rounds": ROUNDS, "cases": {name: compare(call) for name, call in cases().items()}}


# %%
found = timing_vs_peers()
for case, row in found["cases"].items():
    print(
        f"{case} (default call {row['default_call_s']:.2f} s, {row['mhz'][0]:.0f} to {row['mhz'][1]:.0f} MHz)"
    )
    for name, facts in row["methods"].items():
        if facts["truth_us"] is None:
            print(f"   {name:24} no complete record")
            continue
        share = facts["error_us"] / facts["truth_us"]
        print(
            f"   {name:24} {facts['cache']:5} truth {facts['truth_us']:12.2f} µs ± {facts['truth_spread_us']:8.2f}"
            f"  error {facts['error_us']:+10.2f} µs {share:+8.1%}"
        )
print(found.line())
