"""What ``torch.compile`` makes of a model, run on tensors without data: its allocations are the compiler's own.

A compiled step's peak cannot be read off the eager one. The compiler differentiates the whole graph at once,
decides what is kept for the backward pass and what is computed again (the min-cut partitioner), merges
operations so that many results are never stored, writes results over inputs that nobody needs any more, and
orders what is left. So the compiler itself is asked. AOTAutograd and Inductor run as they do for a GPU, up to
the program that allocates and launches; the kernels, whose source is of no interest here, are replaced by ones
that do nothing; and the program runs on the stand-in's tensors.

What is not seen: Dynamo, which comes before. One call is taken for one graph. Where Dynamo would break it
(`torch._dynamo.explain` tells), more is kept between the pieces than is predicted here. Recurrent layers, at
which it always breaks, are refused. Kernels are those of the default mode: no CUDA graphs, no autotuned
templates, static shapes.

Source: ``torch/_inductor/compile_fx.py``, ``torch/_functorch/partitioners.py``, ``torch/_inductor/codegen/wrapper.py``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucourse.stand_in import device

__all__ = ["CompilerError", "collector_paused", "compiler_without_a_gpu", "compiling", "region"]


class CompilerError(RuntimeError):
    """The compiler could not be run without a GPU in this release of torch."""


class _NoKernel:
    """Stands for a kernel: it is launched, and does nothing."""

    def run(self, *_: Any, **__: Any) -> None:
        pass

    __call__ = run


@contextlib.contextmanager
def compiler_without_a_gpu() -> Iterator[None]:
    """Let Inductor write programs for a GPU, and load them with empty kernels, inside the block.

    To be entered inside `gpucourse.stand_in.stand_in`. Nothing is kept on the disk.

    Raises
    ------
    CompilerError
        This release of torch has no such compiler where one is looked for.
    """
    try:
        import torch.utils._triton
        import torch.utils.checkpoint
        from torch._functorch import config as functorch_config
        from torch._inductor import async_compile, codecache, config
        from torch._inductor.codegen import wrapper
    except ImportError as error:
        raise CompilerError(str(error)) from error

    def empty(*_: Any, **__: Any) -> _NoKernel:
        return _NoKernel()

    with contextlib.ExitStack() as stack:

        def change(owner: Any, name: str, value: Any) -> None:
            if name not in vars(owner):
                raise CompilerError(f"{owner.__name__} has no {name}")
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)

        folder = stack.enter_context(tempfile.TemporaryDirectory())
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        stack.callback(_set_back, "TORCHINDUCTOR_CACHE_DIR", before)
        # The stand-in's tensors say that they are the host's, for which Inductor would write C++.
        wanted = {
            "cpu_backend": "triton",
            "compile_threads": 1,
            "fx_graph_cache": False,
            "fx_graph_remote_cache": False,
            "max_autotune": False,
            "max_autotune_gemm": False,
        }
        stack.enter_context(config.patch({k: v for k, v in wanted.items() if hasattr(config, k)}))
        if hasattr(functorch_config, "enable_autograd_cache"):
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        for name in ("triton", "cpp_pybinding", "cpp", "multi_kernel"):
            if name in vars(async_compile.AsyncCompile):
                change(async_compile.AsyncCompile, name, empty)
        # Triton need not be installed: nothing is compiled with it.
        change(wrapper.PythonWrapperCodegen, "write_triton_header_once", lambda _: None)
        change(torch.utils._triton, "triton_hash_with_backend", lambda *_, **__: "none")
        change(codecache.PyCodeCache, "load_by_key_path", staticmethod(_load))
        change(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint_marked(torch))
        yield


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Let no garbage be looked for inside the block: a compilation makes millions of objects and drops few."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _set_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _load(key: str, path: str, linemap: Any = None, attrs: Mapping[str, Any] | None = None) -> Any:
    """Load a generated program so that it allocates on the stand-in."""
    import torch

    stand = device()
    code = Path(path).read_text(encoding="utf-8")
    # A number on the host is read when a kernel is launched; one on the device is not, and there is none to read.
    code = code.replace(".item()", "")
    # An operator that draws random numbers and is run again: the generator's state lies on the host.
    for name in ("run_and_save_rng_state", "run_with_rng_state"):
        code = code.replace(f"torch.ops.higher_order.{name}", name)
    module = types.ModuleType(f"generated_{key}")
    module.__file__ = path
    exec(compile(code, path, "exec"), vars(module))

    def empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device=stand)

    def reinterpret(tensor: Any, size: Any, stride: Any, offset: int) -> Any:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    vars(module).update(
        empty_strided_cpu=empty_strided,
        empty_strided_cuda=empty_strided,
        reinterpret_tensor=reinterpret,
        assert_size_stride=lambda *_: None,
        assert_alignment=lambda *_: None,
        run_and_save_rng_state=lambda call, *args, **kwargs: (torch.empty(16), call(*args, **kwargs)),
        run_with_rng_state=lambda _, call, *args, **kwargs: call(*args, **kwargs),
        **(attrs or {}),
    )
    return module


def _checkpoint_marked(torch: Any) -> Callable[..., Iterator[None]]:
    """Mark what a checkpointed function does as to be computed again, as Dynamo would; the partitioner obeys."""
    from torch.fx import traceback

    original = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    numbers = itertools.count(1)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not compiling():
            yield from original(*args, **kwargs)
            return
        marks = {
            "recompute": torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE,
            "ac_graph_id": next(numbers),
        }
        meta = traceback.current_meta
        before = {name: meta[name] for name in marks if name in meta}
        meta.update(marks)
        try:
            yield
        finally:
            for name in marks:
                meta.pop(name, None)
            meta.update(before)

    return generator


def compiling() -> bool:
    """Say whether a graph is being made for the compiler."""
    import torch

    return torch._guards.TracingContext.try_get() is not None


def region(module: Any, call: Callable[..., Any] | None = None) -> Any:
    """Make the module that runs as one compiled graph.

    Parameters
    ----------
    module
        On the stand-in.
    call
        ``call(module, *args, **kwargs)`` is what is compiled, such as the model with its loss; the module's own
        call by default.

    Returns
    -------
    torch.nn.Module
        With the module's parameters. A graph is compiled at the first call with inputs of new shapes, its
        backward pass at the first backward: both have to be before a trace begins.
    """
    return _region_class()(module, call)


_TENSOR = object()  # where a tensor stands among a call's arguments or results


@functools.cache
def _region_class() -> Any:
    import torch
    from torch.utils import _pytree

    def taken_apart(tree: Any) -> tuple[list[Any], list[Any], Any]:
        leaves, form = _pytree.tree_flatten(tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return tensors, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form

    def put_together(tensors: Any, rest: list[Any], form: Any) -> Any:
        waiting = iter(tensors)
        return _pytree.tree_unflatten([next(waiting) if leaf is _TENSOR else leaf for leaf in rest], form)

    class Flat(torch.nn.Module):
        """The call as a function of tensors alone, which gives tensors alone."""

        def __init__(self, owner: Any, rest: list[Any], form: Any) -> None:
            super().__init__()
            self.module, self.call = owner.module, owner.call
            self.rest, self.form = rest, form
            self.results: Any = None

        def forward(self, *tensors: Any) -> Any:
            args, kwargs = put_together(tensors, self.rest, self.form)
            made = (
                self.module(*args, **kwargs) if self.call is None else self.call(self.module, *args, **kwargs)
            )
            found, *self.results = taken_apart(made)
            return tuple(found)

    class Compiled(torch.nn.Module):
        def __init__(self, module: Any, call: Callable[..., Any] | None) -> None:
            super().__init__()
            self.module, self.call = module, call
            self.programs: dict[Any, tuple[Any, Any]] = {}
            self.train(module.training)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if compiling():  # a part of something that is compiled as a whole
                return self.module(*args, **kwargs)
            tensors, rest, form = taken_apart((args, kwargs))
            key = (
                repr(rest),
                repr(form),
                tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors),
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
                self.training,
            )
            if key not in self.programs:
                self.programs[key] = self._compiled(tensors, rest, form)
            program, results = self.programs[key]
            return put_together(program(*tensors), *results)

        def _compiled(self, tensors: list[Any], rest: list[Any], form: Any) -> Any:
            from torch._inductor.compile_fx import compile_fx
            from torch._subclasses import fake_tensor

            unseen = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
            flat = Flat(self, rest, form)
            with torch.no_grad():
                count = len(flat(*tensors))  # a graph says how many results it has
            graph = torch.fx.Graph()
            given = tuple(graph.placeholder(f"given_{i}") for i in range(len(tensors)))
            made = graph.call_module("flat", given)
            graph.output(tuple(graph.call_function(operator.getitem, (made, i)) for i in range(count)))
            whole = torch.fx.GraphModule(torch.nn.ModuleDict({"flat": flat}), graph)
            try:
                return compile_fx(whole, tensors), tuple(flat.results)
            except (*unseen, NotImplementedError):
                raise
            except Exception as error:
                raise CompilerError(f"{type(error).__name__}: {error}") from error

    return Compiled
