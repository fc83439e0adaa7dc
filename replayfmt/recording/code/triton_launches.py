"""Sees launches of Triton kernels, and records each as an op.

`TritonCode` is a kernel of the program and says what its launches read and write; `KnownKernels` keeps them, as the
program may change what they are made of while they are launched. Of Inductor's autotuners it is asked which
configuration one chooses, and what a launch of it gives the kernel.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from replayfmt.format.codes import KernelKind
from replayfmt.pytorch.tensors.memory import storage_of
from replayfmt.pytorch.triton.accesses import accesses_of
from replayfmt.pytorch.triton.compiled import specialization
from replayfmt.pytorch.triton.kernels import INDUCTOR, INTERPRETER, FormMaker, KernelCode, LaunchForm, NotRepresentable
from replayfmt.pytorch.triton.sources import (
    KernelFunction,
    NotStandalone,
    StandaloneSource,
    compiled_difference,
    interpreted_difference,
    is_callable_of_triton,
    kernel_name,
    standalone_source,
)

from ..dispatch.mode import RecordingMode
from ..kernels import Attached, CodeKernel
from ..patches import HookHost, Patch, Patched, PatchSet, around, report_missing
from ..special_values import is_address
from ..storages.trackers import GENERATED
from ..stream.records import Unrepresentable
from ..undispatched import mark_written
from .configurations import Alternative, CannotTell, Configurations, captured_by, of_autotuner

_TUNER_MODULE = "torch._inductor.runtime.triton_heuristics"
_PASSED_ON = (bool, int, str)
_CACHE = "TRITON_CACHE_DIR"


class AutotunerUnsupported(Exception):
    """What an autotuner launches cannot be told. The text says why."""


@dataclass(frozen=True)
class TunedLaunch:
    """One launch. `function`: Triton's decorated one; `arguments` of its parameters, by name; `options` that it is
    compiled with. `compiled`: what is launched, None if Inductor kept its binary alone. `alike`: whether Triton would
    compile the same for a launch of the function with these arguments. `generated`: Inductor wrote the kernel, not the
    program."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    compiled: Any
    alike: bool
    generated: bool
    chosen: str


def choose(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Have the configuration chosen, as the launch would. Returns those that it was chosen from, if it was. Raises
    AutotunerUnsupported, also for what the launch will raise: a compiler's or a device's error is the program's to
    see."""
    try:
        if len(tuner.launchers) == 0:
            tuner.precompile()
        tried = [each.config for each in tuner.launchers]
        if len(tuner.launchers) > 1 and not _plugins(tuner):
            tuner.autotune_to_one_config(*args, **kwargs)
        meta = tuner.inductor_meta
        if meta.get("combo_tuning_groups") and not getattr(tuner.launchers[0].config, "found_by_combo_autotune", False):
            tuner.launchers = [tuner._combo_sequential_autotune(tuner.launchers[0], *args, **kwargs)]
        if meta.get("coordinate_descent_tuning") and not getattr(tuner.launchers[0].config, "found_by_coordesc", False):
            tuner.launchers = [tuner.coordinate_descent_tuning(tuner.launchers[0], *args, **kwargs)]
        getattr(tuner, "_ensure_kernel_loaded", lambda: None)()
    except Exception as error:
        raise AutotunerUnsupported(f"its configuration could not be chosen: {type(error).__name__}: {error}") from error
    return tried


def _plugins(tuner: Any) -> Any:
    """What may act in place of a launch; PyTorch before 2.12 has no such thing."""
    return getattr(tuner, "_plugins", ())


class TunedFunction(NamedTuple):
    """The decorated function of an autotuner. `kept`: as the autotuner has it; `binders`: by device, what Triton makes
    to specialize arguments (in the function's own place they would keep Inductor from pickling it); `binaries`: what
    Triton has compiled of it, by what Inductor launches."""

    kept: Any
    function: Any
    binders: dict[int, Any]
    binaries: dict[Any, Any]


def function_of(tuner: Any) -> Any:
    """The decorated function of an autotuner, with the function of Python. Inductor drops that when it compiles in
    another process or caches what it compiled, and keeps a way to load the source again. Raises AutotunerUnsupported if
    that gives another text or another hash than what was compiled had."""
    kernel = tuner.fn
    if kernel.fn is not None:
        return kernel
    reload = getattr(tuner, "_reload_kernel", None)
    if reload is None:
        raise AutotunerUnsupported("Inductor compiled it in another process, and kept no way to load its source")
    cache = os.environ.get(_CACHE)
    try:
        loaded = reload().fn
    except Exception as error:
        raise AutotunerUnsupported(f"Inductor cannot load its source again: {type(error).__name__}: {error}") from error
    finally:
        if cache is None:
            os.environ.pop(_CACHE, None)  # which an autotuner sets when it is made
    if loaded.fn is None or loaded.src != kernel.src or kernel.hash not in (None, loaded.cache_key):
        raise AutotunerUnsupported("its source, as Inductor loads it again, is not what was compiled")
    return loaded


def launch_of(tuner: Any, tuned: TunedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TunedLaunch:
    """What a launch gives the kernel. Raises AutotunerUnsupported."""
    heuristics: Any = sys.modules[_TUNER_MODULE]
    if _plugins(tuner):
        raise AutotunerUnsupported("a plugin of its autotuner may do anything in place of a launch")
    (launcher,) = tuner.launchers
    config, function, given = launcher.config, tuned.function, given_to(launcher, args, kwargs)
    result = next((each for each in tuner.compile_results if each.config is config), None)
    meta = tuner._create_compile_meta(config) if result is None else result.compile_meta
    arguments, options, grid = launch_with(tuner, function, config, meta, given)
    scope = launcher.__globals__  # which has what coordinate descent compiled, and nothing else has
    compiled = scope.get("bin", getattr(scope.get("runner"), "__self__", None)) if result is None else result.kernel
    if compiled is not None and not (hasattr(compiled, "asm") and hasattr(compiled, "src")):
        if compiled not in tuned.binaries:
            tuned.binaries[compiled] = _in_tritons_cache(function, compiled, meta)
        compiled = tuned.binaries[compiled]
    alike = compiled is not None and _alike(tuned, arguments, options, compiled)
    generated = tuner.heuristic_type is not heuristics.HeuristicType.USER_AUTOTUNE
    return TunedLaunch(function, arguments, options, grid, compiled, alike, generated, str(config))


def given_to(launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a launcher of Inductor's is given, by name."""
    code = launcher.__code__
    return {**dict(zip(code.co_varnames[: code.co_argcount - 1], args, strict=False)), **kwargs}


def launch_with(
    tuner: Any, function: Any, config: Any, meta: dict[str, Any], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]:
    """The arguments, options and grid of a launch with a configuration. Raises AutotunerUnsupported."""
    heuristics: Any = sys.modules[_TUNER_MODULE]
    known = {"num_warps": config.num_warps, "num_stages": config.num_stages, **config.kwargs, **meta["constants"]}
    missing = [name for name in function.arg_names if name not in given and name not in known]
    if missing:
        raise AutotunerUnsupported(f"its launcher does not say what its parameter {missing[0]} is")
    arguments = {name: given[name] if name in given else known[name] for name in function.arg_names}
    chosen = tuner._create_compile_options(config, meta)
    options = {name: value for name, value in chosen.items() if isinstance(value, _PASSED_ON) and name not in arguments}
    return arguments, options, tuple(heuristics.GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(dict(given)))


def _in_tritons_cache(function: Any, kernel: Any, meta: dict[str, Any]) -> Any:
    """Triton's object for a binary that Inductor launches without Triton, from the cache that Inductor has loaded it
    from. None if it is there no longer, or is another."""
    from triton.compiler import ASTSource, CompiledKernel

    heuristics: Any = sys.modules[_TUNER_MODULE]
    try:
        cache = Path(heuristics.triton_cache_dir(meta["device"] or 0))
        folder = cache / heuristics.triton_hash_to_path_key(kernel.hash)
        files = {each.name: str(each) for each in folder.iterdir() if each.name.startswith(f"{kernel.name}.")}
        source = ASTSource(function, meta["signature"], meta["constants"], meta["configs"][0])
        made: Any = CompiledKernel(source, files, kernel.hash)
        said = made.metadata
        same = (said.hash, said.num_warps, said.shared) == (kernel.hash, kernel.num_warps, kernel.shared)
    except (AttributeError, KeyError, OSError, StopIteration, ValueError):
        return None
    return made if same else None


def _alike(tuned: TunedFunction, arguments: dict[str, Any], options: dict[str, Any], compiled: Any) -> bool:
    import triton

    try:
        device = triton.runtime.driver.active.get_current_device()
        if device not in tuned.binders:
            tuned.binders[device] = tuned.function.create_binder()
        _kernels, _keys, _target, backend, binder = tuned.binders[device]
        bound, special, parsed = binder(**arguments, **options)
        _options, signature, constants, attrs = tuned.function._pack_args(backend, options, bound, special, parsed)
    except (AttributeError, KeyError, TypeError, ValueError):  # another version of Triton
        return False
    source = compiled.src
    return bool(
        specialization(signature, constants, attrs) == specialization(source.signature, source.constants, source.attrs)
    )


class TritonCode(CodeKernel):
    """A Triton kernel. Of a tensor that a launch does not read, such as a stand-in for one that it does without, no
    content is needed. The values of its constexprs decide what a launch reads. `generated`: Inductor wrote it, which
    has all of what it allocates written before it is read."""

    __slots__ = ("_constexprs", "_found", "_generated", "_reads_with", "_source", "assumed", "code")

    def __init__(
        self, code: KernelCode, call: Callable[..., Any], source: StandaloneSource, *, generated: bool = False
    ) -> None:
        super().__init__(KernelKind.triton, code.schema, call, [Attached(*each) for each in code.attached])
        self.code, self._source, self._generated, form = code, source, generated, code.form
        self.assumed = tuple(sorted(self.indices[name] for name in code.assumed))
        forms = [(name, form.parameters[name]) for name in form.constexprs]
        self._constexprs = [(name, argument) for name, argument in forms if isinstance(argument, str)]
        self._reads_with: dict[str, frozenset[str] | None] = {}  # by the values of its constexprs
        self._found: dict[frozenset[str], TritonCode] = {}  # by what a launch changed

    def found_to_change(self, changed: Iterable[int]) -> TritonCode:
        names = frozenset(self.arguments[index].name for index in changed)
        if names not in self._found:
            code = self.code.found_to_change(names)
            self._found[names] = TritonCode(code, self.call, self._source, generated=self._generated)
        return self._found[names]

    def reads(self, index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        argument = self.arguments[index]
        if self._generated:
            given: dict[str, Any] = kwargs
            storage = storage_of(given[argument.name])
            written = [storage_of(given[self.arguments[each].name])._cdata for each in self.writes]
            if hasattr(storage, GENERATED) and storage._cdata in written:
                return False
        # What it does not write of a tensor has to be what it was.
        if argument.written:
            return True
        read = self.code.read if self.code.read is not None else self._read_with(kwargs)
        return read is None or self.code.form.owner[argument.name] in read

    def _read_with(self, kwargs: dict[str, object]) -> frozenset[str] | None:
        constants = {name: kwargs[argument] for name, argument in self._constexprs}
        key = repr(constants)
        if key not in self._reads_with:
            self._reads_with[key] = accesses_of(self._source, constants).read
        return self._reads_with[key]


_MOST_VERSIONS = 8  # of one kernel


class KnownKernel(NamedTuple):
    """A decorated function, and the functions that it is given, as they were at one time."""

    decorated: tuple[Any, ...]
    function: KernelFunction
    source: StandaloneSource
    forms: FormMaker

    @classmethod
    def of(cls, kernel: Any, functions: tuple[Any, ...]) -> KnownKernel:
        """As they are now. Raises NotStandalone, NotRepresentable."""
        function, source = KernelFunction.of(kernel), standalone_source(kernel, functions)
        constexprs = [name for name, kind in function.parameter_types.items() if kind == "constexpr"]
        return cls((kernel, *functions), function, source, FormMaker(function.signature.parameters, constexprs, source))


class KnownKernels:
    """Those of one capture."""

    def __init__(self) -> None:
        self._versions: dict[tuple[int, ...], list[KnownKernel]] = {}  # by the decorated objects' ids, latest last
        self._ran: dict[Any, KnownKernel | str] = {}  # by what was compiled, or the source of what is interpreted

    def at_this_time(self, kernel: Any, values: tuple[Any, ...]) -> KnownKernel:
        """A kernel and the functions among its arguments, as they are now as far as that is quick to tell. Raises
        NotStandalone, NotRepresentable."""
        functions = tuple({id(each): each for each in values if is_callable_of_triton(each)}.values())
        versions = self._versions.setdefault((id(kernel), *map(id, functions)), [])
        if not versions or not versions[-1].source.holds():
            _add(versions, KnownKernel.of(kernel, functions))
        return versions[-1]

    def what_ran(self, now: KnownKernel, compiled: Any) -> KnownKernel | str:
        """What a launch ran, or why that is not known. `now`: what `at_this_time` gave; `compiled`: what Triton had
        compiled of it, perhaps long before."""
        if compiled is None and not now.function.interpreted:
            return now  # Inductor has kept it for itself
        made = now.source if compiled is None else compiled
        if made not in self._ran:
            self._ran[made] = (
                interpreted_difference(now.source) or now if compiled is None else self._compiled_from(now, compiled)
            )
        return self._ran[made]

    def _compiled_from(self, now: KnownKernel, compiled: Any) -> KnownKernel | str:
        difference = compiled_difference(now.source, compiled)
        if not difference:
            return now
        kernel, *functions = now.decorated
        versions = self._versions[tuple(map(id, now.decorated))]
        for each in versions[-2::-1]:
            if not compiled_difference(each.source, compiled):
                return each
        # Not all that a kernel is made of tells when it changes.
        try:
            new = KnownKernel.of(kernel, tuple(functions))
        except (NotStandalone, NotRepresentable):
            return difference
        if new.source.text != now.source.text and not compiled_difference(new.source, compiled):
            _add(versions, new)
            return new
        return difference


def _add(versions: list[KnownKernel], new: KnownKernel) -> None:
    versions.append(new)
    del versions[:-_MOST_VERSIONS]


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
    tuned: Tuned | None = None  # by Inductor


class Tuned(NamedTuple):
    """What an autotuner chose for a launch, and the launches that it chose from."""

    chosen: str
    alternatives: Callable[[], Iterable[Alternative]]


class _Described(NamedTuple):
    """One launch: the function, its parameters by name, and its options."""

    known: KnownKernel
    bound: Mapping[str, Any]
    options: Mapping[str, Any]


class TritonLaunches(Patched):
    """The hooks of one capture."""

    def __init__(self, recorder: HookHost) -> None:
        self._recorder = recorder
        self._known = KnownKernels()
        self._kernels: dict[Any, CodeKernel] = {}
        self._tuned_functions: dict[int, TunedFunction] = {}  # by what their autotuners keep
        self.configurations = Configurations()
        self._chosen_from: dict[int, tuple[Any, list[Any]]] = {}  # Inductor's autotuners, kept, and what each tried
        # `tuner`: the autotuner that runs; `tried`: configurations; `launch`: what the kernel's call does
        self._now = threading.local()
        self._patches = PatchSet(table(self), functools.partial(report_missing, recorder))

    # -------------------------------------------------------------------------------------------------------- the hooks

    def launch(
        self, original: _Function, kernel: Any, /, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any
    ) -> Any:
        """Of a decorated function: `kernel[grid](…)`, compiled or interpreted."""

        def with_grid(sizes: Any) -> Any:
            return original(kernel, *args, grid=sizes, warmup=False, **kwargs)

        def compiled(sizes: Any) -> Any:
            return original(kernel, *args, grid=sizes, warmup=True, **kwargs)

        mode = None if warmup else self._recorder.attempt(self._recorder.mode_here)
        if mode is None:
            return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        return self._launch(mode, _Launch(kernel, args, kwargs, with_grid, compiled), grid)

    def bind(self, original: _Function, compiled: Any, grid: Any) -> _Function:
        """Of a compiled kernel: `compiled[grid](…)`, which passes the decorated function by."""

        def run(runner: _Function, /, *args: Any, **kwargs: Any) -> Any:
            mode = self._recorder.attempt(self._recorder.mode_here)
            if mode is None:
                return runner(*args, **kwargs)
            kernel = getattr(getattr(compiled, "src", None), "fn", compiled)
            launch = _Launch(kernel, args, {}, lambda _grid: runner(*args, **kwargs), lambda _grid: compiled)
            return self._launch(mode, launch, grid)

        return around(run)(original(compiled, grid))

    def call_launcher(self, original: _Function, launcher: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of Triton's launcher of a compiled kernel. A program that calls it passes all of the above by."""
        if self._recorder.attempt(self._recorder.mode_here) is None:
            return original(launcher, *args, **kwargs)
        run = functools.partial(original, launcher, *args, **kwargs)
        return self._unrecorded(launcher, "its launcher was called, which knows no source", run, (args, kwargs))

    def tune(self, original: _Function, tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of an autotuner: the configuration that it chose is that of the launch inside."""
        before, own = getattr(self._now, "tuner", None), self._recorder.attempt(self._own_trials, tuner)
        self._now.tuner, self._now.tried = tuner, []
        if own:
            tuner._bench = functools.partial(around(self.trial)(type(tuner)._bench), tuner)
        try:
            return original(tuner, *args, **kwargs)
        finally:
            self._now.tuner = before
            if own:
                vars(tuner).pop("_bench", None)

    @staticmethod
    def _own_trials(tuner: Any) -> bool:
        """Whether the class of an autotuner has a `_bench` of its own, which `trial` is not around."""
        home = next((kind.__module__ for kind in type(tuner).__mro__ if "_bench" in vars(kind)), _AUTOTUNER)
        return "_bench" not in vars(tuner) and home != _AUTOTUNER

    def trial(self, original: _Function, tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of an autotuner: it tries a configuration."""
        if self._recorder.attempt(self._recorder.mode_here) is None:
            return original(tuner, *args, **kwargs)
        self._now.tried.append(kwargs.get("config"))
        try:
            with self._recorder.hidden():
                return original(tuner, *args, **kwargs)
        finally:
            mark_written(self._recorder, self._recorder.attempt(self._tried, tuner, args, kwargs))

    def launch_of_inductor(self, original: _Function, tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of Inductor's autotuner."""
        mode = self._recorder.attempt(self._recorder.mode_here)
        # Its trials are launches, too, and under the interpreter it launches the decorated function.
        if mode is None or kwargs.get("benchmark_run") or getattr(tuner, "triton_interpret", False):
            return original(tuner, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in _OF_TUNER}
        with self._recorder.hidden():
            told = self._recorder.attempt(_explained, self._tuned, tuner, args, given)
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
            self._choice_of_inductor(tuner, told, args, given),
        )
        return self._launch(mode, launch, told.grid)

    def _tuned(self, tuner: Any, args: tuple[Any, ...], given: dict[str, Any]) -> TunedLaunch:
        """What a launch of Inductor's autotuner gives the kernel, once the configuration is chosen. Raises
        AutotunerUnsupported."""
        tried = choose(tuner, args, given)
        if len(tried) > 1:
            self._chosen_from[id(tuner)] = tuner, tried
        known = self._tuned_functions.get(id(tuner.fn))  # kept, so that no other has its id
        if known is None:
            known = self._tuned_functions[id(tuner.fn)] = TunedFunction(tuner.fn, function_of(tuner), {}, {})
        return launch_of(tuner, known, args, given)

    def _choice_of_inductor(
        self, tuner: Any, launch: TunedLaunch, args: tuple[Any, ...], given: dict[str, Any]
    ) -> Tuned | None:
        """None if there was one configuration, or it was chosen before the capture began."""
        if id(tuner) not in self._chosen_from:
            return None

        def alternatives() -> Iterable[Alternative]:
            by_name = given_to(tuner.launchers[0], args, given)
            for each in self._chosen_from[id(tuner)][1]:
                meta = tuner._create_compile_meta(each)
                yield Alternative(str(each), *launch_with(tuner, launch.function, each, meta, by_name))

        return Tuned(launch.chosen, alternatives)

    def _tried(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that a trial launch may have written."""
        given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        try:
            written = accesses_of(self._known.at_this_time(_innermost(tuner), tuple(given.values())).source).written
        except (NotStandalone, NotRepresentable):
            written = None
        if written is None or tuner.user_defined_pre_hook or tuner.user_defined_post_hook:
            return list(given.values())
        written |= {*tuner.reset_to_zero, *tuner.restore_value}
        return [value for name, value in given.items() if name in written]

    # --------------------------------------------------------------------------------------------------------- a launch

    def _launch(self, mode: RecordingMode, launch: _Launch, grid: Any) -> Any:
        described = self._recorder.attempt(_explained, self._describe, launch)
        how = grid
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
                self._recorder.attempt(self._note_choice, launch, described, how, *recorded)
                self._now.launch = run
                return mode.issue(recorded[0], (), recorded[1].arguments)
            why = recorded
        return self._unrecorded(launch.kernel, why, run, (launch.args, launch.kwargs))

    def _note_choice(
        self, launch: _Launch, described: _Described, grid: Any, kernel: TritonCode, form: LaunchForm
    ) -> None:
        """What else an autotuner could have launched, if one chose this launch."""
        tuner: Any = getattr(self._now, "tuner", None)
        tuned, depends_on = launch.tuned, None
        if tuned is None:
            if getattr(tuner, "best_config", None) is None or _innermost(tuner) is not launch.kernel:
                return
            depends_on = captured_by(grid)
            tuned = Tuned(str(tuner.best_config), lambda: self._tried_by_triton(tuner, launch, described, grid))
        same = {name: form.values[argument] for name, argument in form.options.items()}

        def launches() -> Iterable[tuple[str, LaunchForm]]:
            for configuration, bound, options, sizes in tuned.alternatives():
                given = sizes(dict(bound)) if callable(sizes) else sizes
                numbers = tuple(operator.index(each) for each in given)
                yield configuration, described.known.forms.lay_out(bound, {**same, **options}, numbers)

        with self._recorder.hidden():
            self.configurations.note(kernel.code, form, tuned.chosen, depends_on, launches)

    def _tried_by_triton(self, tuner: Any, launch: _Launch, described: _Described, grid: Any) -> Iterable[Alternative]:
        for configuration, kwargs in of_autotuner(tuner, self._now.tried, launch.args, launch.kwargs):
            other = self._describe(launch._replace(kwargs=kwargs))
            if isinstance(other, str):
                raise CannotTell(other)
            yield Alternative(configuration, other.bound, other.options, grid)

    def _unrecorded(self, kernel: Any, why: Any, run: _Function, given: Any) -> Any:
        """Launch what cannot be recorded."""
        if self._recorder.launching():
            self._recorder.attempt(self._tell, kernel, why)
        try:
            with self._recorder.hidden():
                return run()
        finally:
            mark_written(self._recorder, given)

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
            apart = [name for name in _COMPILED_FOR if name not in described.bound]
            options = {**{name: getattr(compiled.metadata, name) for name in apart}, **options}
        try:
            sizes = tuple(operator.index(each) for each in grid)
            form = known.forms.lay_out(described.bound, options, sizes)
        except NotRepresentable as problem:
            return str(problem)
        except TypeError:
            return f"its grid {grid!r} is no tuple of integers"
        for name, value in form.values.items():
            on_host = compiled is None  # a device has no use for an address of the host's heap
            if type(value) is int and (on_host or value >> 32) and is_address(value):
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
            chosen = launch.tuned.chosen if launch.tuned is not None else chosen
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


def _innermost(tuner: Any) -> Any:
    """The decorated function that an autotuner launches."""
    while not is_callable_of_triton(tuner):
        tuner = tuner.fn
    return tuner


def _explained(step: Callable[..., _T], *args: Any) -> _T | str:
    """What a step returns, or why it cannot be done with this Triton."""
    try:
        return step(*args)
    except AutotunerUnsupported as problem:
        return str(problem)
    except (AttributeError, ImportError) as error:
        return f"this version of Triton is not known to the recorder ({error})"


def table(launches: TritonLaunches) -> list[Patch]:
    """Every hook, for one capture."""
    return [
        Patch("triton.runtime.jit", "JITFunction.run", around(launches.launch), REASON, vital=True),
        Patch("triton.runtime.interpreter", "InterpretedFunction.run", around(launches.launch), REASON, vital=True),
        Patch("triton.compiler.compiler", "CompiledKernel.__getitem__", around(launches.bind), REASON),
        Patch("triton.backends.nvidia.driver", "CudaLauncher.__call__", around(launches.call_launcher), REASON),
        Patch("triton.backends.amd.driver", "HIPLauncher.__call__", around(launches.call_launcher), REASON),
        Patch(_AUTOTUNER, "Autotuner.run", around(launches.tune), REASON, vital=True),
        Patch(_AUTOTUNER, "Autotuner._bench", around(launches.trial), REASON, vital=True),
        Patch(_HEURISTICS, "CachingAutotuner.run", around(launches.launch_of_inductor), REASON, vital=True),
    ]
