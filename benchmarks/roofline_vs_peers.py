# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
"""Our ceilings beside those of two usual ways to measure them, in one run; then a whole step under the roof.

Run it on a CUDA machine with `gpucourse record benchmarks/roofline_vs_peers.py`; chapter 05 shows the tables.

The peers: `triton.testing.do_bench`, and a loop of event pairs around each product, as sweeps for the maximum
achievable rate have it. Each sweeps shapes of its own and ours, so that neither wins by a shape alone. Bursts
alternate, round by round, each after a rest; long loads alternate within one hot period.
"""

# %%
import statistics
import time

import torch

from gpucourse.kernels import trace
from gpucourse.recording import recorded
from gpucourse.roofline import (
    family_of,
    generated_arguments,
    measure_roofline,
    shape_ceilings,
    step_budget,
    sustained,
)
from gpucourse.training import (
    GPT,
    next_token_loss,
    night_config,
    plain_step,
    random_tokens,
)

ROUNDS = 2
REST_S = 0.3
SUSTAINED_S = 30.0
KEPT_ROWS = 36  # of a budget; the others are summed by kind
PEER_SHAPES = [(n, n, n) for n in (1024, 2048, 4096, 6144, 8192)] + [(4096, 4096, 8192), (3072, 5632, 8192)]
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precisions():
    """Name the precisions that this GPU has."""
    found = ["fp32"]
    if torch.cuda.get_device_capability() >= (8, 0):
        found.append("tf32")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        found.append("bf16")
    return [*found, "fp16"]


def product(precision, shape):
    """Give a product of random matrices as the peers have it: both as they are, the result given."""
    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=DTYPES[precision])
    b = torch.randn(k, n, device="cuda", dtype=DTYPES[precision])
    out = torch.empty(m, n, device="cuda", dtype=DTYPES[precision])
    return lambda: torch.mm(a, b, out=out)


def fits(precision, shape):
    """Say whether a product fits in half of the free memory."""
    m, n, k = shape
    return (m * k + k * n + m * n) * DTYPES[precision].itemsize < torch.cuda.mem_get_info()[0] / 2


def tflops(shape, ms):
    """Give the rate of a product of this shape."""
    m, n, k = shape
    return 2 * m * n * k / ms / 1e9


def event_loop_ms(call, warm_up=5, count=20):
    """Time a call as the usual sweeps do: warm up, then an event pair around each of some calls."""
    for _ in range(warm_up):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def do_bench_ms(call):
    """Time a call by triton's do_bench with its default times; None where there is no triton."""
    try:
        from triton.testing import do_bench
    except ModuleNotFoundError:
        return None
    return do_bench(call, return_mode="median")


def allow_tf32(precision):
    """Let fp32 products run in tf32 where that is what is measured."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def peer_burst(precision, shapes):
    """Sweep the shapes by both peers' ways, each after a rest; the best of each."""
    allow_tf32(precision)
    best = {"event_loop": {"tflops": 0.0, "shape": None}, "do_bench": {"tflops": None, "shape": None}}
    for shape in shapes:
        if not fits(precision, shape):
            continue
        call = product(precision, shape)
        for name, read in (("event_loop", event_loop_ms), ("do_bench", do_bench_ms)):
            torch.cuda.synchronize()
            time.sleep(REST_S)
            ms = read(call)
            if ms is not None and tflops(shape, ms) > (best[name]["tflops"] or 0.0):
                best[name] = {"tflops": tflops(shape, ms), "shape": list(shape)}
        del call
    allow_tf32("fp32")
    return best


def peer_copy_gb_per_s():
    """Time a device copy by both peers' ways, read plus write, on as many bytes as our own stream."""
    n = int(min(2**31, torch.cuda.mem_get_info()[0] // 8))
    source = torch.empty(n // 4, device="cuda").uniform_()
    target = torch.empty_like(source)
    found = {}
    for name, read in (("event_loop", event_loop_ms), ("do_bench", do_bench_ms)):
        ms = read(lambda: target.copy_(source))
        found[name] = None if ms is None else 2 * source.nbytes / ms / 1e6
    return found


@recorded
def roofline_burst():
    """Bursts: our measured roof and both peers' sweeps, in alternation."""
    roofs, peers = {}, {}
    for precision in precisions():
        rounds = []
        for _ in range(ROUNDS):
            ours = measure_roofline(precision)
            best = ours.best_product
            shapes = [*PEER_SHAPES, best.shape] if best.shape not in PEER_SHAPES else PEER_SHAPES
            theirs = peer_burst(precision, shapes)
            copies = peer_copy_gb_per_s()
            rounds.append(
                {
                    "ours_tflops": best.rate / 1e12,
                    "ours_shape": best.what,
                    "ours_copy_gb_per_s": ours.stream("copy").rate / 1e9,
                    "clock_mhz": list(ours.clock_mhz),
                    "peers": theirs,
                    "peer_copy_gb_per_s": copies,
                }
            )
            if precision not in roofs or best.rate > roofs[precision].best_product.rate:
                roofs[precision] = ours
        peers[precision] = rounds
    return {"roofs": roofs, "peers": peers}


def hot_peer(precision, seconds):
    """Sweep the peers' shapes by event pairs on a device that stays under load; medians in TFLOP/s by shape."""
    allow_tf32(precision)
    calls = {shape: product(precision, shape) for shape in PEER_SHAPES if fits(precision, shape)}
    rates = {shape: [] for shape in calls}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for shape, call in calls.items():
            if shape[0] >= 2048:
                rates[shape].append(tflops(shape, event_loop_ms(call, warm_up=2, count=30)))
    allow_tf32("fp32")
    return {" × ".join(map(str, shape)): statistics.median(found) for shape, found in rates.items() if found}


def hot_ours(measured, precision, seconds):
    """Load the device with our best shape again, as `measure_roofline` did; TFLOP/s over these seconds."""
    best = next(ceiling for ceiling in measured.sustained if ceiling.is_product)
    m, n, k = best.shape
    a = torch.randn(m, k, device="cuda", dtype=DTYPES[precision])
    turned = "transposed" in best.what
    b = torch.randn(n, k, device="cuda", dtype=DTYPES[precision]).t() if turned else (
        torch.randn(k, n, device="cuda", dtype=DTYPES[precision])
    )  # fmt: skip
    out = torch.empty(m, n, device="cuda", dtype=DTYPES[precision])
    allow_tf32(precision)
    rows = sustained({"ours": (lambda: torch.mm(a, b, out=out), statistics.median(best.samples_ms))}, seconds)
    allow_tf32("fp32")
    return statistics.median(tflops(best.shape, row[2]) for row in rows)


def under_load(names):
    """Measure these precisions under a long load: ours for 30 s, then the peer and ours in turn, still hot."""
    found = {}
    for precision in names:
        if precision not in precisions():
            continue
        ours = measure_roofline(precision, sustained_s=SUSTAINED_S)
        turns = []
        for _ in range(2):
            theirs = hot_peer(precision, 2.0)
            turns.append({"peer_tflops": theirs, "ours_tflops": hot_ours(ours, precision, 2.0)})
        found[precision] = {"roof": ours, "turns": turns}
    return found


@recorded
def roofline_sustained_full():
    """Long loads in fp32 and tf32."""
    return under_load(("fp32", "tf32"))


@recorded
def roofline_sustained_half():
    """Long loads in bf16 and fp16."""
    return under_load(("bf16", "fp16"))


def examples_that_fit():
    """Give the night's 16 examples a step, or what fits: 1.25 GB each and 4 GB of state and workspace."""
    return max(1, min(16, int((torch.cuda.mem_get_info()[0] / 1e9 - 4) / 1.5)))


def hot_ms(step, seconds=4.0):
    """Run steps for some seconds and give the time of one by the host's clock, over the later half."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began, times = time.perf_counter(), []
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 3 * 1e3)
    return statistics.median(times[len(times) // 2 :])


def totals(budget, step_ms):
    """Give a budget's sums without its rows, and what they are of the step's own time."""
    return {
        "least_us": budget.least_us,
        "expected_us": budget.expected_us,
        "uncounted_us": budget.uncounted_us,
        "gap_us": budget.gap_us,
        "explained": budget.explained,
        "explained_at_shapes": budget.explained_at_shapes,
        "least_over_step": budget.least_us / 1e3 / step_ms,
        "expected_over_step": budget.expected_us / 1e3 / step_ms,
    }


def timed_then_traced(config, half, examples):
    """Time each way to do the night's step, hot; then trace each: a trace slows every later launch."""
    model = GPT(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = random_tokens(config, examples, device="cuda")
    losses = {"eager": next_token_loss, "compiled": torch.compile(next_token_loss)}
    steps, times, failed = {}, {}, {}
    for precision in ("fp32", half):
        for way, loss_of in losses.items():
            name = f"{precision}_{way}"

            def step(precision=precision, loss_of=loss_of):
                plain_step(model, optimizer, tokens, targets, precision, loss_of=loss_of)

            try:
                times[name] = hot_ms(step)
                steps[name] = step
            except Exception as error:  # a compiler that is not there, or cannot: that way stays unmeasured
                failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return times, {name: trace(step) for name, step in steps.items()}, failed


@recorded(needs_gb=6)
def step_budgets():
    """Explain the night's step, eager and compiled, in fp32 and a half type."""
    half = "bf16" if "bf16" in precisions() else "fp16"
    roofs = {p: measure_roofline(p, sustained_s=8.0) for p in ("fp32", half)}
    hot_roofs = {p: roof.sustained_roofline for p, roof in roofs.items()}
    config, examples = night_config(), examples_that_fit()
    times, traces, failed = timed_then_traced(config, half, examples)
    torch.cuda.empty_cache()
    every = shape_ceilings(*traces.values(), families=None)
    shaped = ("product", "attention")
    alone = {key: ms for key, ms in every.items() if family_of(key.split()[0]) in shaped}
    options = {"arguments": generated_arguments(), "list_elements": config.parameters}
    found = {"examples": examples, "half": half, "failed": failed, "roofs": roofs, "steps": {}}
    for name, traced in traces.items():
        budget = step_budget(traced, roofs, alone=alone, **options)
        hot = step_budget(traced, hot_roofs, alone=alone, **options)
        all_alone = step_budget(traced, roofs, alone=every, **options)
        found["steps"][name] = {
            **budget.condensed(KEPT_ROWS).as_dict(),
            "step_ms": times[name],
            "tokens_per_s": examples * config.context / times[name] * 1e3,
            "complete": traced.complete,
            "burst": totals(budget, times[name]),
            "sustained": totals(hot, times[name]),
            "every_call_alone": totals(all_alone, times[name]),
        }
    return found


# %%
found = roofline_burst()
for precision, rounds in found["peers"].items():
    for row in rounds:
        best = row["peers"]
        print(
            f"{precision}: ours {row['ours_tflops']:.1f} ({row['ours_shape']}), "
            f"event pairs {best['event_loop']['tflops']:.1f} {best['event_loop']['shape']}, "
            f"do_bench {best['do_bench']['tflops']} {best['do_bench']['shape']} TFLOP/s; "
            f"copy ours {row['ours_copy_gb_per_s']:,.0f}, peers {row['peer_copy_gb_per_s']} GB/s"
        )
print(found.line())

# %%
for long_load in (roofline_sustained_full, roofline_sustained_half):
    found = long_load()
    for precision, row in found.data.items():
        hot = row["roof"]["sustained"]
        print(f"{precision}: {hot['tflops']:.1f} TFLOP/s after {hot['seconds']:.0f} s ({hot['what']})")
        for turn in row["turns"]:
            shape, rate = max(turn["peer_tflops"].items(), key=lambda pair: pair[1])
            print(f"   ours {turn['ours_tflops']:.1f}, event pairs {rate:.1f} ({shape})")
    print(found.line())

# %%
found = step_budgets()
for name, row in found["steps"].items():
    print(
        f"{name}: {row['step_ms']:.1f} ms hot, traced {row['span_us'] / 1e3:.1f} ms, idle {row['gap_us'] / 1e3:.1f}; "
        f"burst roof {row['burst']['explained']:.1%} of the trace; "
        f"sustained roof {row['sustained']['least_over_step']:.1%} of the hot step; "
        f"products and attention alone {row['explained_at_shapes']:.1%}; "
        f"every call alone {row['every_call_alone']['expected_us'] / row['span_us']:.1%}"
    )
print(found["failed"] or "every way was measured")
print(found.line())
