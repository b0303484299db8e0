"""Importing the package is light, its arithmetic needs no torch, and its imports run one way."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted((SOURCE / "gpucourse").rglob("*.py"))
HEAVY = ("torch", "matplotlib", "pint", "ipywidgets", "IPython", "jupytext", "nbclient")
# A widget, or a model's class, is an object of these packages: there is nothing to put off.
ESSENTIAL = {"gpucourse.widgets": {"ipywidgets", "IPython"}, "gpucourse.gpt": {"torch"}}


def name_of(file: Path) -> str:
    """Give the dotted name of a module's file."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = [name_of(f) for f in FILES]


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(statement: str) -> list[str]:
    """Name the heavy packages that a statement loads in a new interpreter."""
    return fresh(f"import sys\n{statement}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])").split()


def test_importing_the_package_takes_less_than_a_fifth_of_a_second() -> None:
    clock = "import time; t = time.perf_counter(); import gpucourse; print(time.perf_counter() - t)"
    assert min(float(fresh(clock)) for _ in range(3)) < 0.2


EACH = """
import importlib, json, os, sys
import numpy  # which most of them load
found = {}
for module in MODULES:
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            importlib.import_module(module)
            told = [name for name in HEAVY if name in sys.modules]
        except BaseException as error:
            told = repr(error)
        os.write(writes, json.dumps(told).encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        found[module] = json.load(pipe)
    os.wait()
print(json.dumps(found))
"""


def heavy_packages(modules: list[str]) -> dict[str, list[str] | str]:
    """Import each module in a copy of one interpreter, and name the heavy packages that are loaded then."""
    found = json.loads(fresh(f"MODULES, HEAVY = {modules!r}, {HEAVY!r}\n{EACH}"))
    return dict(found)


def test_importing_a_module_loads_none_of_the_heavy_packages() -> None:
    allowed = {module: ESSENTIAL.get(".".join(module.split(".")[:2]), set()) for module in MODULES}
    found = heavy_packages(MODULES)
    assert list(found) == MODULES
    assert {m: told for m, told in found.items() if isinstance(told, str) or set(told) - allowed[m]} == {}


def test_a_heavy_package_that_is_loaded_is_seen() -> None:
    assert loaded("import pint") == ["pint"]
    found = heavy_packages(["gpucourse", "pint", "no_such_module"])
    assert found["gpucourse"] == []
    assert found["pint"] == ["pint"]
    assert "ModuleNotFoundError" in found["no_such_module"]


WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None  # what an import finds where it is not installed\n"


def test_without_torch_every_module_can_be_imported() -> None:
    light = [m for m in MODULES if "torch" not in ESSENTIAL.get(m, set())]
    fresh(WITHOUT_TORCH + f"import importlib\nfor m in {light!r}: importlib.import_module(m)")


def test_without_torch_the_ledger_computes() -> None:
    code = """
from gpucourse.memory_ledger import MemoryLedger
ledger = MemoryLedger()
assert abs(ledger.total_gb(16) - 8.64) < 1e-9
assert ledger.max_microbatch == 54
assert [round(b.activations_gb, 2) for b in ledger.blocks(16)] == [1.09, 2.18, 3.26, 4.35, 5.44]
print("computed")
"""
    assert fresh(WITHOUT_TORCH + code) == "computed"


def test_without_torch_the_roofline_computes() -> None:
    code = """
from gpucourse.roofline import Roofline, compute_c12, validate_shapes_and_units
from gpucourse.units import ureg
roof = Roofline(peak_flops=989e12, bandwidth=4.8e12)
assert roof.attainable(0.125) == 0.6e12
assert roof.bound(0.125) == "memory"
quantity = ureg.Quantity
batch = {"P_peak": quantity(989, "TFLOP/s"), "I": quantity(0.125, "FLOP/byte"), "B_mem": quantity(4.8, "TB/s")}
assert abs(float(compute_c12(validate_shapes_and_units(batch))) / 0.6e12 - 1) < 1e-12
print("computed")
"""
    assert fresh(WITHOUT_TORCH + code) == "computed"


def test_torch_really_is_out_of_reach_in_these_tests() -> None:
    assert fresh(WITHOUT_TORCH + "try:\n import torch\nexcept ModuleNotFoundError:\n print('none')") == "none"


# ------------------------------------------------------------------------------------------- one direction


def imports(source: str, module: str) -> set[str]:
    """Name the package's modules that a module imports, at its top or in a function; type hints aside."""
    tree = ast.parse(source)
    hints = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for block in hints for inner in ast.walk(block)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import, line {node.lineno}"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {p if p in MODULES else str(node.module) for p in parts}
    return {m for m in found if m in MODULES} - {module}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle in the order of their imports, empty where there is none."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_imports_between_modules_run_one_way() -> None:
    graph = {name_of(f): imports(f.read_text(encoding="utf-8"), name_of(f)) for f in FILES}
    assert cycle(graph) == []


def test_a_cycle_is_found_also_where_an_import_hides_in_a_function() -> None:
    hidden = "def f():\n    from gpucourse import recording\n"
    assert imports(hidden, "gpucourse.html") == {"gpucourse.recording"}
    assert (
        imports(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {hidden.splitlines()[1]}", "x")
        == set()
    )
    assert sorted(set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}))) == ["a", "b", "c"]
