"""Sees launches of Triton kernels, and records each as an op.

A kernel is recorded as the source that a replay needs, in a module of its own, with what Triton compiled of it. What an
autotuner does to choose a configuration is not part of the capture: what its trial launches write is imported again.
Inside an op (a custom operator that launches Triton, say) nothing is recorded: the replay calls the outer op as a
whole. A launch that cannot be written down is one `unsupported` record that says why.

The table at the end is the list of what is hooked. Nothing is imported just to be hooked (see hooks/patches.py).
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from replayfmt.pytorch.inductor.triton_tuners import NotTold, TunedLaunch, choose, launch_of
from replayfmt.pytorch.triton.accesses import accesses_of
from replayfmt.pytorch.triton.forms import LaunchForm, NotRepresentable
from replayfmt.pytorch.triton.functions import NotStandalone, is_callable_of_triton, kernel_name
from replayfmt.pytorch.triton.kernels import INDUCTOR, INTERPRETER, KernelCode

from ..dispatch.handles import is_address
from ..dispatch.mode import RecordingMode
from ..frames import leave_no_frames
from ..hooks.patches import Patch, Patched, PatchSet
from ..stream.records import Unrepresentable
from .kernels import CodeKernel
from .triton_code import TritonCode
from .triton_known import KnownKernel, KnownKernels

_T = TypeVar("_T")
_Function = Callable[..., Any]
REASON = "triton_launch"
_COMPILED_FOR = ("num_warps", "num_ctas", "num_stages")
_AUTOTUNER = "triton.runtime.autotuner"
_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_OF_TUNER = ("stream", "benchmark_run")  # what Inductor's autotuner takes for itself


class _Launch(NamedTuple):
    """One launch as the program makes it. `run` makes it with a grid, `compiled` has Triton compile for it."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: _Function
    compiled: _Function
    by: str = INTERPRETER  # what ran it, if nothing is known of what was compiled
    binary: bool = True  # whether a launch of the kernel finds what was compiled
    generated: bool = False  # whether Inductor wrote the kernel


class _Described(NamedTuple):
    """One launch: the function, its parameters by name, and its options."""

    known: KnownKernel
    bound: Mapping[str, Any]
    options: Mapping[str, Any]


class RecorderForLaunches(Protocol):
    """What the hooks need from a recorder."""

    def mode_here(self) -> RecordingMode | None:
        """The mode that sees what this thread does now: the one that records it, or observes an operator."""
        ...

    def launching(self) -> bool:
        """This thread is about to do work that cannot be recorded. Returns whether it is being recorded."""
        ...

    def hidden(self) -> AbstractContextManager[Any]: ...

    def attempt(self, step: Callable[..., _T], *args: Any) -> _T | None: ...

    def unsupported(self, reason: str, op: str, detail: str) -> int | None: ...
    def unsupported_throughout(self, reason: str, op: str, detail: str) -> None: ...

    def mark_outside_write(self, tensor: torch.Tensor) -> bool: ...


class TritonLaunches(Patched):
    """The hooks of one capture."""

    def __init__(self, recorder: RecorderForLaunches) -> None:
        self._recorder = recorder
        self._known = KnownKernels()
        self._kernels: dict[Any, CodeKernel] = {}
        self._now = threading.local()  # `tuner`: the autotuner that runs; `launch`: what the kernel's call does
        self._patches = PatchSet(table(self), self._report_missing)

    def _report_missing(self, patch: Patch) -> None:
        """Work that goes through it would go unseen."""
        detail = f"this build has no {patch.target}, so work that goes through it cannot be seen"
        self._recorder.unsupported_throughout(REASON, patch.target, detail)

    # -------------------------------------------------------------------------------------------------------- the hooks

    def launch(self, original: _Function) -> _Function:
        """Of a decorated function: `kernel[grid](…)`, compiled or interpreted."""

        @functools.wraps(original)
        def run(kernel: Any, /, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
            def with_grid(sizes: Any) -> Any:
                return original(kernel, *args, grid=sizes, warmup=False, **kwargs)

            def compiled(sizes: Any) -> Any:
                return original(kernel, *args, grid=sizes, warmup=True, **kwargs)

            try:
                mode = None if warmup else self._recorder.attempt(self._recorder.mode_here)
                if mode is None:
                    return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
                return self._launch(mode, _Launch(kernel, args, kwargs, with_grid, compiled), grid)
            except BaseException as error:
                leave_no_frames(error)
                raise

        return run

    def bind(self, original: _Function) -> _Function:
        """Of a compiled kernel: `compiled[grid](…)`, which passes the decorated function by."""

        @functools.wraps(original)
        def bound(compiled: Any, grid: Any) -> _Function:
            runner = original(compiled, grid)

            @functools.wraps(runner)
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    mode = self._recorder.attempt(self._recorder.mode_here)
                    if mode is None:
                        return runner(*args, **kwargs)
                    kernel = getattr(getattr(compiled, "src", None), "fn", compiled)
                    launch = _Launch(kernel, args, {}, lambda _grid: runner(*args, **kwargs), lambda _grid: compiled)
                    return self._launch(mode, launch, grid)
                except BaseException as error:
                    leave_no_frames(error)
                    raise

            return run

        return bound

    def call_launcher(self, original: _Function) -> _Function:
        """Of Triton's launcher of a compiled kernel. A program that calls it passes all of the above by."""

        @functools.wraps(original)
        def call(launcher: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                if self._recorder.attempt(self._recorder.mode_here) is None:
                    return original(launcher, *args, **kwargs)
                run = functools.partial(original, launcher, *args, **kwargs)
                return self._unrecorded(launcher, "its launcher was called, which knows no source", run, (args, kwargs))
            except BaseException as error:
                leave_no_frames(error)
                raise

        return call

    def tune(self, original: _Function) -> _Function:
        """Of an autotuner: the configuration that it chose is that of the launch inside."""

        @functools.wraps(original)
        def run(tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            before, own = getattr(self._now, "tuner", None), self._recorder.attempt(self._own_trials, tuner)
            self._now.tuner = tuner
            if own:
                tuner._bench = functools.partial(self.trial(type(tuner)._bench), tuner)
            try:
                return original(tuner, *args, **kwargs)
            except BaseException as error:
                leave_no_frames(error)
                raise
            finally:
                self._now.tuner = before
                if own:
                    vars(tuner).pop("_bench", None)

        return run

    @staticmethod
    def _own_trials(tuner: Any) -> bool:
        return "_bench" not in vars(tuner) and _tries_its_own_way(tuner)

    def trial(self, original: _Function) -> _Function:
        """Of an autotuner: it tries a configuration."""

        @functools.wraps(original)
        def bench(tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.attempt(self._recorder.mode_here) is None:
                return original(tuner, *args, **kwargs)
            try:
                with self._recorder.hidden():
                    return original(tuner, *args, **kwargs)
            except BaseException as error:
                leave_no_frames(error)
                raise
            finally:
                for tensor in tensors_of(self._recorder.attempt(self._tried, tuner, args, kwargs)):
                    self._recorder.mark_outside_write(tensor)

        return bench

    def launch_of_inductor(self, original: _Function) -> _Function:
        """Of Inductor's autotuner."""

        @functools.wraps(original)
        def run(tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                mode = self._recorder.attempt(self._recorder.mode_here)
                # Its trials are launches, too, and under the interpreter it launches the decorated function.
                if mode is None or kwargs.get("benchmark_run") or getattr(tuner, "triton_interpret", False):
                    return original(tuner, *args, **kwargs)
                given = {name: value for name, value in kwargs.items() if name not in _OF_TUNER}
                with self._recorder.hidden():
                    told = self._recorder.attempt(_explained, _tuned, tuner, args, given)
                if not isinstance(told, TunedLaunch):
                    return self._unrecorded(tuner, told, lambda: original(tuner, *args, **kwargs), (args, given))
                launch = _Launch(
                    told.function,
                    (),
                    {**told.arguments, **told.options},
                    lambda _grid: original(tuner, *args, **kwargs),
                    lambda _grid: told.compiled,
                    INDUCTOR,
                    told.alike,
                    told.generated,
                )
                return self._launch(mode, launch, told.grid)
            except BaseException as error:
                leave_no_frames(error)
                raise

        return run

    def _tried(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that a trial launch may have written."""
        given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        kernel = tuner
        while not is_callable_of_triton(kernel):
            kernel = kernel.fn
        try:
            written = accesses_of(self._known.at_this_time(kernel, tuple(given.values())).source).written
        except (NotStandalone, NotRepresentable):
            written = None
        if written is None or tuner.user_defined_pre_hook or tuner.user_defined_post_hook:
            return list(given.values())
        written |= {*tuner.reset_to_zero, *tuner.restore_value}
        return [value for name, value in given.items() if name in written]

    # --------------------------------------------------------------------------------------------------------- a launch

    def _launch(self, mode: RecordingMode, launch: _Launch, grid: Any) -> Any:
        described = self._recorder.attempt(_explained, self._describe, launch)
        if callable(grid) and isinstance(described, _Described):
            grid = grid(dict(described.bound))
        run = functools.partial(launch.run, grid)
        if described is None:  # recording has failed
            return run()
        why = described
        if isinstance(described, _Described):
            compiled = None
            if hasattr(launch.kernel, "device_caches"):
                with self._recorder.hidden():
                    compiled = launch.compiled(grid)
            recorded = self._recorder.attempt(_explained, self._recorded_as, described, launch, grid, compiled)
            if recorded is None:
                return run()
            if isinstance(recorded, tuple):
                self._now.launch = run
                return mode.issue(recorded[0], (), recorded[1].arguments)
            why = recorded
        return self._unrecorded(launch.kernel, why, run, (launch.args, launch.kwargs))

    def _unrecorded(self, kernel: Any, why: Any, run: _Function, given: Any) -> Any:
        """Launch what cannot be recorded."""
        if self._recorder.launching():
            self._recorder.attempt(self._tell, kernel, why)
        try:
            with self._recorder.hidden():
                return run()
        finally:
            for tensor in tensors_of(given):
                self._recorder.mark_outside_write(tensor)

    def _call(self, **_arguments: Any) -> Any:
        """What a kernel's call does. Nothing inside is recorded: the interpreter calls operators of its own."""
        run, self._now.launch = self._now.launch, None
        with self._recorder.hidden():
            return run()

    def _tell(self, kernel: Any, why: str) -> None:
        function: Any = getattr(kernel, "fn", None)
        code = getattr(function, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        detail = f"a Triton kernel{where} was launched that a replay could not launch: {why}"
        self._recorder.unsupported(REASON, kernel_name(kernel), detail)

    def _describe(self, launch: _Launch) -> _Described | str:
        """The function, its parameters and the options of a launch, or why it cannot be recorded."""
        kernel, args, kwargs = launch.kernel, launch.args, launch.kwargs
        if getattr(kernel, "pre_run_hooks", ()):
            return "it has hooks that run before it, which may do anything"
        try:
            known = self._known.at_this_time(kernel, (*args, *kwargs.values()))
        except (NotStandalone, NotRepresentable) as problem:
            return str(problem)
        if known.function.takes_any_number:
            return "it takes any number of arguments"
        try:
            bound = known.function.bind(args, kwargs)
        except TypeError as error:
            return f"its arguments do not fit its parameters ({error})"
        names = known.function.signature.parameters
        options = {name: value for name, value in kwargs.items() if name not in names or name.startswith("num_")}
        return _Described(known, bound, options)

    def _recorded_as(
        self, described: _Described, launch: _Launch, grid: Any, compiled: Any
    ) -> tuple[CodeKernel, LaunchForm] | str:
        """The kernel of a launch, and its arguments. `compiled`: what Triton compiled for it, if it did."""
        known, options = self._known.what_ran(described.known, compiled), described.options
        if isinstance(known, str):
            return known
        if compiled is not None:
            options = {**{name: getattr(compiled.metadata, name) for name in _COMPILED_FOR}, **options}
        try:
            sizes = tuple(operator.index(each) for each in grid)
            form = known.forms.lay_out(described.bound, options, sizes)
        except NotRepresentable as problem:
            return str(problem)
        except TypeError:
            return f"its grid {grid!r} is no tuple of integers"
        for name, value in form.values.items():
            if type(value) is int and is_address(value):
                return f"its argument {name} is the address of something in this process, which a replay has elsewhere"
        key = (
            known.source,
            compiled,
            launch.binary,
            launch.generated,
            repr((form.types, form.parameters, form.dtypes)),
        )
        kernel = self._kernels.get(key)
        if kernel is None:
            tuner: Any = getattr(self._now, "tuner", None)
            chosen = str(tuner.best_config) if getattr(tuner, "best_config", None) is not None else ""
            name, source = known.function.name, known.source
            try:
                accesses = accesses_of(source)
                code = KernelCode.of_launch(
                    name, source, form, accesses, chosen, compiled, target=launch.by, binary=launch.binary
                )
                kernel = self._kernels[key] = TritonCode(code, self._call, source, generated=launch.generated)
            except NotRepresentable as problem:
                return str(problem)
            except Unrepresentable as problem:
                return problem.detail
        return kernel, form


def _tries_its_own_way(tuner: Any) -> bool:
    """Whether the class of an autotuner has a `_bench` of its own, which `trial` is not around."""
    return next((kind.__module__ for kind in type(tuner).__mro__ if "_bench" in vars(kind)), _AUTOTUNER) != _AUTOTUNER


def _tuned(tuner: Any, args: tuple[Any, ...], given: dict[str, Any]) -> TunedLaunch:
    """What a launch of Inductor's autotuner gives the kernel, once the configuration is chosen. Raises NotTold."""
    choose(tuner, args, given)
    return launch_of(tuner, args, given)


def _explained(step: Callable[..., _T], *args: Any) -> _T | str:
    """What a step returns, or why it cannot be done with this Triton."""
    try:
        return step(*args)
    except NotTold as problem:
        return str(problem)
    except (AttributeError, ImportError) as error:
        return f"this version of Triton is not known to the recorder ({error})"


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in arguments: also inside lists, tuples, dicts and Triton's tensor descriptors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


def table(launches: TritonLaunches) -> list[Patch]:
    """Every hook, for one capture."""
    return [
        Patch("triton.runtime.jit", "JITFunction.run", launches.launch, REASON, vital=True),
        Patch("triton.runtime.interpreter", "InterpretedFunction.run", launches.launch, REASON, vital=True),
        Patch("triton.compiler.compiler", "CompiledKernel.__getitem__", launches.bind, REASON),
        Patch("triton.backends.nvidia.driver", "CudaLauncher.__call__", launches.call_launcher, REASON),
        Patch("triton.backends.amd.driver", "HIPLauncher.__call__", launches.call_launcher, REASON),
        Patch(_AUTOTUNER, "Autotuner.run", launches.tune, REASON, vital=True),
        Patch(_AUTOTUNER, "Autotuner._bench", launches.trial, REASON, vital=True),
        Patch(_HEURISTICS, "CachingAutotuner.run", launches.launch_of_inductor, REASON, vital=True),
    ]
