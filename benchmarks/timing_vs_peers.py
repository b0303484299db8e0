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
(in a CUDA graph, queued behind other work, one at a time) and the same place in them. `time_cuda` takes a short call
as the difference of a graph of 2n and one of n calls behind a spinning kernel, so its truth are calls n to 2n of such
a graph behind such a kernel. The truth of one call is the kernel's span, or first start to last end where a call
launches several kernels. Readings and truths alternate, round by round, each round with graphs of its own.

Beside the truths stand two things about them: `time_cuda`'s own estimate by events and the same estimate by the
profiler's record of those very launches ("same launches"); and what the profiler adds to a call, by events around the
same launches with the profiler and without.
"""

# %%
import itertools
import re
import statistics
import time

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from gpucourse import cuda_events
from gpucourse.cuda_events import time_cuda
from gpucourse.recording import recorded

ROUNDS = 5
CALLS = 10  # calls in one profiled stretch of a peer's launches
UNWATCHED = 3  # readings without the profiler, beside each with it
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


def behind_spin(ms, *steps):
    """Enqueue the steps behind a spinning kernel, with an event after each; give the events."""
    torch.cuda._sleep(int(ms * 2_000_000))
    events = []
    for step in steps:
        step()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    return events


def between(events):
    """Give the times between neighbouring events in µs."""
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]


def length(records):
    """Give first start to last end in µs."""
    return max(end for _, end, _ in records) - records[0][0]


def watched(run, calls, value):
    """Enqueue with the profiler and without it: the records without the spin's, and both estimates in µs a call."""
    unwatched = statistics.median(value(between(run())) for _ in range(UNWATCHED))
    events = []
    records = device_records(lambda: events.extend(run()))[0][1:]
    return records, value(between(events)) / calls, unwatched / calls


NOTHING_SEEN = {"spans": [], "events_us": None, "records_us": None, "profiling_us": None}


def as_timed(call, method):
    """Look at the launches that `time_cuda` times a call by, as it makes them: its graphs or its queue."""
    in_graphs = re.search(r"graphs of \d+ and (\d+) calls", method)
    in_queue = re.match(r"(\d+) calls? queued", method)
    if in_graphs:
        n = int(in_graphs[1])
        less = cuda_events._capture(call, n)
        more = cuda_events._capture(call, 2 * n, less)
        records, events_us, unwatched_us = watched(
            lambda: behind_spin(0.5, less.replay, less.replay, more.replay), n, lambda two: two[1] - two[0]
        )
        each = len(records) // (4 * n)
        if each == 0 or each * 4 * n != len(records):
            return NOTHING_SEEN
        first, second = records[each * n : each * 2 * n], records[each * 2 * n :]
        found, records_us = spans(second, 2 * n)[n:], (length(second) - length(first)) / n
    elif in_queue:
        n = int(in_queue[1])
        records, events_us, unwatched_us = watched(
            lambda: behind_spin(2.0, lambda: None, lambda: [call() for _ in range(n)]), n, lambda one: one[0]
        )
        found = spans(records, n)
        if not found:
            return NOTHING_SEEN
        records_us = length(records) / n
    else:
        return NOTHING_SEEN  # timed another way on this device
    return {
        "spans": found,
        "events_us": events_us,
        "records_us": records_us,
        "profiling_us": events_us - unwatched_us,
    }


def as_timed_cold(call, method):
    """Look at the graphs of flushes with and without the call, as `time_cuda` makes them."""
    in_graphs = re.search(r"graphs of (\d+) flushes", method)
    if not in_graphs:
        return NOTHING_SEEN
    n, flush = int(in_graphs[1]), cuda_events._flush_of_l2()
    fills = {name for _, _, name in device_records(flush)[0]}

    def flushed():
        flush()
        call()

    alone = cuda_events._capture(flush, n)
    together = cuda_events._capture(flushed, n, alone)
    records, events_us, unwatched_us = watched(
        lambda: behind_spin(0.5, alone.replay, alone.replay, together.replay), n, lambda two: two[1] - two[0]
    )
    first, second = records[n : 2 * n], records[2 * n :]
    found = spans([record for record in second if record[2] not in fills], n)
    if not found or sum(record[2] in fills for record in second) != n:
        return NOTHING_SEEN
    return {
        "spans": found,
        "events_us": events_us,
        "records_us": (length(second) - length(first)) / n,
        "profiling_us": events_us - unwatched_us,
    }


def looks(call, long, method, cold_method):
    """Give, for each launch mode, a function that has the profiler look at it."""
    flush = torch.empty(L2_BYTES_FLUSHED, dtype=torch.int8, device="cuda")
    fills = {name for _, _, name in device_records(flush.zero_)[0]}
    calls = 3 if long else CALLS

    def cold():
        for _ in range(calls):
            flush.zero_()
            call()

    def seen(run, without=()):
        records = [record for record in device_records(run)[0] if record[2] not in without]
        return {**NOTHING_SEEN, "spans": spans(records, calls)}

    return {
        "as timed": lambda: as_timed(call, method),
        "as timed, cold": lambda: as_timed_cold(call, cold_method),
        "graph": lambda: seen(captured(call, calls).replay),
        "queue": lambda: seen(lambda: [call() for _ in range(calls)]),
        "cold queue": lambda: seen(cold, fills),
    }


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
    found = {
        "time_cuda": ("warm", "as timed", lambda: time_cuda(call, max_seconds=0.1).median_ms * 1e3),
        "time_cuda, cold": (
            "cold",
            "as timed, cold",
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
    begin = time.perf_counter()
    timing = time_cuda(call)
    default_s = time.perf_counter() - begin
    cold_method = time_cuda(call, l2="cold", max_seconds=0.1).method
    ways, look_at = methods(call, long), looks(call, long, timing.method, cold_method)
    rows = {name: {"readings_us": [], "truths_us": []} for name in ways}
    own = {mode: [] for mode in ("as timed", "as timed, cold")}
    mhz = []
    for _ in range(ROUNDS):
        for mode, look in look_at.items():
            seen = look()
            if mode in own:
                own[mode].append(seen)
            for name, (_, its_mode, read) in ways.items():
                if its_mode == mode:
                    rows[name]["truths_us"].append(
                        statistics.median(seen["spans"]) if seen["spans"] else None
                    )
                    rows[name]["readings_us"].append(read())
            mhz.append(spin_mhz())
    for name, (cache, mode, _) in ways.items():
        row = rows[name]
        pairs = [(r, t) for r, t in zip(row["readings_us"], row["truths_us"], strict=True) if t is not None]
        errors = [reading - truth for reading, truth in pairs]
        truths = [truth for _, truth in pairs]
        row |= {"cache": cache, "mode": mode, "rounds": len(pairs)}
        row["truth_us"] = statistics.median(truths) if truths else None
        row["error_us"] = statistics.median(errors) if errors else None
        row["truth_spread_us"] = max(truths) - min(truths) if truths else None
        if mode in own:
            whole = [seen for seen in own[mode] if seen["spans"]]
            row["profiling_us"] = statistics.median(s["profiling_us"] for s in whole) if whole else None
            row["same_launches"] = {
                key: [seen[key] for seen in whole] for key in ("events_us", "records_us", "profiling_us")
            }
    return {
        "methods": rows,
        "default_call_s": default_s,
        "method": timing.method,
        "cold_method": cold_method,
        "escaped": timing.escaped,
        "throttled": timing.throttled,
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
        f"{case} (default call {row['default_call_s']:.2f} s, {row['mhz'][0]:.0f} to {row['mhz'][1]:.0f} MHz, "
        f"{row['method']})"
    )
    for name, facts in row["methods"].items():
        if facts["truth_us"] is None:
            print(f"   {name:24} no complete record")
            continue
        share = facts["error_us"] / facts["truth_us"]
        line = (
            f"   {name:24} {facts['cache']:5} truth {facts['truth_us']:12.2f} µs ± {facts['truth_spread_us']:8.2f}"
            f"  error {facts['error_us']:+10.2f} µs {share:+8.1%}"
        )
        if "same_launches" in facts:
            same = facts["same_launches"]
            apart = statistics.median(
                e - r for e, r in zip(same["events_us"], same["records_us"], strict=True)
            )
            line += f"  same launches {apart:+.2f} µs, profiler adds {facts['profiling_us']:+.2f} µs"
        print(line)
print(found.line())
