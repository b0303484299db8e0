"""What is public is documented: a first sentence, the parameters it really has, the errors it really raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted((SOURCE / "gpucourse").rglob("*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Its text is the verdict a learner reads, which `Raises` sections describe once, in the core.
OWN_BUSINESS = {"NotImplementedError", "AssertionError", "SystemExit"}


def public(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield the public classes, functions and methods of a module with their dotted names."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition) and not child.name.startswith("_"):
                decorators = {ast.unparse(d).split(".")[-1] for d in child.decorator_list}
                if decorators & {"overload", "setter"}:
                    continue
                yield f"{prefix}{child.name}", child
                if isinstance(child, ast.ClassDef):
                    waiting.append((f"{prefix}{child.name}.", child))


def faults(source: str, checkers: bool = False) -> list[str]:
    """Say what is not documented in a module's source, empty where all is."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["the module has no docstring"]
    for name, node in public(tree):
        text = ast.get_docstring(node)
        if not text:
            found.append(f"{name} has no docstring")
            continue
        if not re.search(r"[.:?]$", text.split("\n\n")[0].strip()):
            found.append(f"{name}: the first sentence has no end: {text.splitlines()[0]}")
        if isinstance(node, ast.ClassDef):
            continue
        given, told = parameters(node), documented(text)
        if told and sorted(given) != sorted(told):
            found.append(f"{name} has the parameters {given} and documents {told}")
        missing = [e for e in raised(node) if not re.search(rf"\b{e}\b", text)]
        if missing and not checkers:
            found.append(f"{name} raises {', '.join(missing)} and does not say so")
    return found


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Name a function's parameters, without self and cls."""
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    names += [p.arg for p in (a.vararg, a.kwarg) if p is not None]
    return [n for n in names if n not in ("self", "cls")]


def documented(text: str) -> list[str]:
    """Name what the Parameters section of a docstring describes; empty where it has none."""
    section = re.search(r"^Parameters\n-{3,}\n(.*?)(?=^\w[^\n]*\n-{3,}$|\Z)", text, re.S | re.M)
    if section is None:
        return []
    heads = re.findall(r"^(\*{0,2}\w[^\n:]*?)(?: : [^\n]*)?$", section[1], re.M)
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


def raised(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Name the exceptions that the function's own body constructs and raises, those of inner functions aside."""
    names = []
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            name = ast.unparse(part.exc.func).split(".")[-1]
            if name[:1].isupper() and name not in OWN_BUSINESS:
                names.append(name)
        waiting.extend(ast.iter_child_nodes(part))
    return sorted(set(names))


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_everything_public_is_documented(module: Path) -> None:
    # A checker raises Wrong by contract; checkpoints/_core.py says so for all of them.
    chapter = module.parent.name == "checkpoints" and not module.name.startswith("_")
    assert faults(module.read_text(encoding="utf-8"), checkers=chapter) == []


GOOD = '''"""Module."""

def f(a, *b, c=1, **d):
    """Do it.

    Parameters
    ----------
    a, c : int
        Numbers: of two kinds.
    *b
        More.
    **d : dict
        Even more.

    Raises
    ------
    ValueError
        Always.
    """
    def inner():
        raise KeyError("not f's own")
    raise ValueError("no")

class C:
    """A thing."""

    def method(self):
        """Do it."""

    def _private(self):
        raise OSError("nobody's business")
'''


def test_a_documented_module_has_no_fault() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"""Module."""\n', "", "the module has no docstring"),
        ('    """A thing."""', "    x = 1", "C has no docstring"),
        ('        """Do it."""', "        pass", "C.method has no docstring"),
        ("A thing.", "A thing", "C: the first sentence has no end: A thing"),
        ("a, c : int", "a : int", "f has the parameters ['a', 'c', 'b', 'd'] and documents ['a', 'b', 'd']"),
        ("c=1", "e=1", "f has the parameters ['a', 'e', 'b', 'd'] and documents ['a', 'c', 'b', 'd']"),
        ("    ValueError\n", "    KeyError\n", "f raises ValueError and does not say so"),
    ],
)
def test_what_is_not_documented_is_found(old: str, new: str, fault: str) -> None:
    assert GOOD.count(old) == 1
    assert faults(GOOD.replace(old, new)) == [fault]
