"""Code kernels of captures in a replay: Triton kernels and Inductor's C++ kernels. Used only if the user allows code.

The source of a Triton kernel is loaded and launched by Triton itself, with less Python for what it has launched before.
Of Inductor's C++ kernels the stored library is used where it fits this machine, else the source is compiled.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from types import ModuleType
from typing import Any

import torch

from replayfmt.errors import ReplayFailed, first_line
from replayfmt.format.model import Kernel, Node
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.pytorch.cpp_kernels import (
    CannotLoad,
    CppArgument,
    StoredCppKernel,
    compiled,
    differences,
    load,
    schema_of,
)
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.triton.compiled import GivenCubin, StoredBinary, given_binary
from replayfmt.pytorch.triton.kernels import INTERPRETER, Assembly, StoredKernel
from replayfmt.pytorch.triton.sources import KernelFunction, is_callable_of_triton, load_source

from ..planning.kernels import Effects, ResolvedKernel, StoredCodeKernel, effects_of_schema

_WRITTEN_AFTER = "3.9."  # what `run` does is Triton's own affair, and differs between its versions


def launcher_of(function: Any) -> Callable[..., Any]:
    """A function that does what `function.run(…, warmup=False)` does, and returns what that returns. For versions of
    Triton that it was not written after, it is no more than that."""
    import triton

    whole = partial(function.run, warmup=False)
    if not triton.__version__.startswith(_WRITTEN_AFTER):
        return whole
    from triton import knobs
    from triton.runtime import driver, jit

    kind = type(function)
    own = kind.run
    # Whoever has put a function of their own in its place (a recorder, a profiler) is to see every launch.
    if getattr(own, "__globals__", None) is not vars(jit):
        return whole
    runtime, compilation = knobs.runtime, knobs.compilation
    # By device and specialization: Triton's caches then, what else decided which kernel it was, and the kernel.
    launched: dict[Any, tuple[Any, Any, Any]] = {}

    def launch(*args: Any, grid: Any, **options: Any) -> Any:
        if (
            kind.run is not own
            or function.pre_run_hooks
            or function.used_global_vals  # which have to be what they were
            or runtime.add_stages_inspection_hook is not None
        ):
            return function.run(*args, grid=grid, warmup=False, **options)
        active = driver.active
        device = active.get_current_device()
        caches = function.device_caches[device]
        bound, specialization, given = caches[4](*args, **options)
        settings = (
            given,
            function.debug,
            runtime.debug,
            compilation.instrumentation_mode,
            compilation.fpsan_homomorphic_casts,
        )
        key = (device, *specialization)
        known = launched.get(key)
        if known is None or known[0] is not caches or known[1] != settings:
            kernel = whole(*args, grid=grid, **options)
            if kernel is not None:
                launched[key] = caches, settings, kernel
            return kernel
        kernel = known[2]
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        values = bound.values()
        kernel.run(
            x,
            y,
            z,
            stream,
            kernel.function,
            kernel.packed_metadata,
            kernel.launch_metadata(grid, stream, *values),
            runtime.launch_enter_hook,
            runtime.launch_exit_hook,
            *values,
        )
        return kernel

    return launch


def with_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same launches, during which Triton gets from PyTorch the memory that some kernels need beside their arguments
    (for tensor descriptors that they make), unless the caller has said where it comes from."""
    from triton.runtime import _allocation

    chosen = getattr(_allocation, "_allocator", None)
    if not isinstance(chosen, ContextVar):
        return run

    def launch(*args: Any, **kwargs: Any) -> Any:
        if type(chosen.get()) is not _allocation.NullAllocator:
            return run(*args, **kwargs)
        before = chosen.set(_allocate)
        try:
            return run(*args, **kwargs)
        finally:
            chosen.reset(before)

    return launch


def _allocate(length: int, _alignment: int, _stream: Any) -> torch.Tensor:
    """Memory on the current device, which PyTorch aligns to more than Triton asks for."""
    return torch.empty(length, dtype=torch.uint8, device=torch.accelerator.current_accelerator())


_SWITCH = "TRITON_INTERPRET"
_MOST_PROGRAMS = (1 << 31) - 1
_MOST_FURTHER = 65535  # in the second and third dimension of a grid, on devices


def resolve_triton(
    kernel: Kernel, contents: Callable[[], Mapping[str, bytes]], device_types: frozenset[str]
) -> ResolvedKernel | str:
    """The kernel of a capture whose code the user has allowed to run, or a sentence that says why there is none.
    `contents` are its attachments by role, `device_types` those that the replay uses."""
    named = kernel.qualified_name
    try:
        stored = StoredKernel.read(contents())
        schema = parse_schema(kernel.schema)
    except (RuntimeError, ValueError) as error:
        return f"{named} cannot be launched: {first_line(error)}"
    interpreted = device_types <= {"cpu"}
    if stored.source is None and interpreted:
        return f"{named} cannot be interpreted: the capture has no source of it"
    problem = provide(interpreted)
    if problem:
        return f"{named} is a Triton kernel: {problem}"
    try:
        return TritonKernel(named, stored, schema, interpreted=interpreted)
    except (RuntimeError, ValueError) as error:
        return f"{named} cannot be launched: {error}"


def _constexprs(function: Any) -> list[str]:
    kinds = KernelFunction.of(function).parameter_types
    return [name for name, kind in kinds.items() if kind == "constexpr"]


def prepare_triton(device_types: frozenset[str]) -> None:
    """Import Triton as a replay on these devices needs it, before anybody else does. What fails is found again when
    kernels are resolved."""
    provide(device_types <= {"cpu"})


def provide(interpreted: bool) -> str:
    """Import Triton, to interpret or to compile. Returns why that cannot be, or ""."""
    if sys.modules.get("triton") is None:
        before = os.environ.get(_SWITCH)
        os.environ[_SWITCH] = "1" if interpreted else "0"
        try:
            import triton
        except ImportError as error:
            return f"Triton is not installed here ({error}); pip install triton"
        finally:
            if before is None:
                del os.environ[_SWITCH]
            else:
                os.environ[_SWITCH] = before
    import triton.language

    if (type(triton.language.sum).__name__ == "InterpretedFunction") is not interpreted:
        way = "interpret" if interpreted else "compile"
        return (
            f"this process has imported Triton to {'compile' if interpreted else 'interpret'} kernels, and cannot "
            f"{way} them now; set {_SWITCH}={int(interpreted)} before it is imported"
        )
    if interpreted:
        triton.knobs.runtime.interpret = True  # what Triton asks when it decorates and calls functions
    return ""


class TritonKernel(StoredCodeKernel):
    """One kernel, which can be launched once it is loaded. `how` says what runs it."""

    _function: Any = None  # until it is loaded

    def __init__(self, named: str, stored: StoredKernel, schema: torch.FunctionSchema, *, interpreted: bool) -> None:
        """Raises ValueError if metadata and schema do not fit each other."""
        self._named, self._stored, self._schema, self._interpreted = named, stored, schema, interpreted
        self._names = [argument.name for argument in schema.arguments]
        given = [stored.grid, *stored.options.values(), *stored.dtypes]
        missing = [name for name in given if name not in self._names]
        if missing:
            raise ValueError(f"its metadata name arguments that its schema does not have ({', '.join(missing)})")
        self._parameters = list(stored.parameters)
        self._options = [(name, given) for name, given in stored.options.items() if name not in stored.parameters]
        self._dtypes = [(name, getattr(torch, kind, None)) for name, kind in stored.dtypes.items()]
        self._several_devices = not interpreted and torch.accelerator.device_count() > 1
        self._grids: set[tuple[int, ...]] = set()  # those that were checked
        self._compiled_with: dict[str, Any] = {}  # options besides those of the launch
        self.how = "run by Triton's interpreter" if interpreted else "compiled by Triton from the stored source"
        if interpreted and stored.target != INTERPRETER:
            self.how += ", which did not run it when it was captured"

    def loaded(self) -> TritonKernel | str:
        try:
            module = load_source(self._stored.module, self._named)
        except (Exception, SystemExit) as error:
            return f"{self._named}: its source cannot be loaded: {type(error).__name__}: {error}"
        try:
            self._use_module(module)
            if not self._interpreted:
                self.use_binary()
        except (RuntimeError, ValueError) as error:
            return f"{self._named} cannot be launched: {error}"
        return self

    def _use_module(self, module: ModuleType) -> None:
        """Launch the kernel of a loaded source. Raises ValueError if that does not fit metadata and schema."""
        stored = self._stored
        function: Any = vars(module).get(stored.function)
        if not is_callable_of_triton(function):
            raise ValueError(f"its source has no kernel {stored.function!a}")
        if list(function.arg_names) != self._parameters:
            raise ValueError(f"its metadata have the parameters {self._parameters}, its source {function.arg_names}")
        self._function = function
        self._assembly = Assembly(stored.parameters, frozenset(self._names), module)
        declared = enumerate(inspect.signature(function.fn).parameters.values())
        # Triton takes what is named like an option for one only if it is given by name; so is all that is after it.
        by_name = [at for at, each in declared if each.kind is each.KEYWORD_ONLY or each.name in stored.options]
        self._keywords = range(min(by_name, default=len(self._parameters)), len(self._parameters))

    def _require_loaded(self) -> None:
        if self._function is None:
            raise ValueError("no call of the kernel can be replayed, so its own code was not loaded")

    def with_function(self, function: Any) -> TritonKernel:
        """The kernel with another function, which is launched as this one is."""
        if not is_callable_of_triton(function):
            raise ValueError("it is not decorated by triton.jit (an autotuner has to choose its configuration before)")
        self._require_loaded()
        parameters, expected = list(function.arg_names), list(self._function.arg_names)
        if parameters != expected:
            raise ValueError(f"it takes the parameters {parameters}, the kernel takes {expected}")
        constexprs = [_constexprs(each) for each in (function, self._function)]
        if constexprs[0] != constexprs[1]:
            raise ValueError(f"its constexprs are {constexprs[0]}, those of the kernel are {constexprs[1]}")
        return self._launching(function)

    @property
    def identity(self) -> tuple[str, str]:
        """Its source and its name there, as the configurations in a capture name them."""
        return self._stored.source_sha256, self._stored.function

    @property
    def configuration(self) -> str:
        """What an autotuner chose, "" if none did."""
        return self._stored.configuration

    def from_source(self) -> TritonKernel:
        """The kernel, compiled here for whatever it is launched with. Raises ValueError without its source."""
        self._require_loaded()
        if self._stored.source is None:
            raise ValueError("the capture has only the binary of the captured configuration, and no source of others")
        if self._interpreted or self._stored.binary is None:
            return self
        return self._launching(vars(load_source(self._stored.source, f"{self._named} from source"))[self.identity[1]])

    def _launching(self, function: Any) -> TritonKernel:
        """The same kernel, that launches another function."""
        other = copy.copy(self)
        vars(other).pop("call", None)
        other._function = function
        return other

    @property
    def schema(self) -> torch.FunctionSchema:
        return self._schema

    @cached_property
    def call(self) -> Callable[..., Any]:
        return self._plain_launch() or self.launch

    def effects(self, layout: SlotLayout) -> Effects:
        return effects_of_schema(layout, self._schema, False, complete=True)

    def problem_with_arguments(self, nodes: Sequence[Node]) -> str:
        return ""  # Triton looks at the types at each launch, and a stored binary is launched for its own alone

    def runs_on(self, device_type: str) -> bool:
        return self._interpreted == (device_type == "cpu")

    @property
    def is_interpreted(self) -> bool:
        return self._interpreted

    def launched_here(self) -> list[Any]:
        """What Triton has launched of it on the current device: its objects of stored and of compiled code, each of
        other arguments. Empty under the interpreter, and before the first launch."""
        if self._interpreted:
            return []
        import triton

        device = triton.runtime.driver.active.get_current_device()
        return list(self._function.device_caches[device][0].values())

    def use_binary(self) -> None:
        """Launch the stored binary, if it is one for the current device. Raises RuntimeError if there is none that
        Triton compiles for, ValueError if there is neither such a binary nor the source."""
        import triton

        binary = self._stored.binary
        target = triton.runtime.driver.active.get_current_target()
        self._options_of_capture(target)
        if binary is None:
            return
        problem = binary.mismatch(target, triton.__version__)
        if problem and self._stored.source is None:
            raise ValueError(f"the capture has no source of it, and its binary is not one for this device: {problem}")
        if problem:
            self.how += f": {problem}"
            return
        self.how = "launched from the stored binary"
        self._launch_binary(self._function, binary)

    def _options_of_capture(self, target: Any) -> None:
        """Launch with the options that it was compiled with, whatever Triton would choose here."""
        from triton.compiler import make_backend

        known = vars(make_backend(target).parse_options({}))
        self._compiled_with = self._stored.arithmetic_options(target, known)

    def with_binary(self, given: GivenCubin) -> TritonKernel:
        """The kernel with a cubin of the user's, which is launched as this one's binary is."""
        import triton

        if self._interpreted:
            raise ValueError("Triton's interpreter runs the kernel here, and it launches no binaries")
        self._require_loaded()
        if self._stored.binary is None:
            raise ValueError("the capture has no binary of the kernel, as which it would be launched")
        device = triton.runtime.driver.active
        target, version = device.get_current_target(), triton.__version__
        most_shared_bytes = device.utils.get_device_properties(device.get_current_device())["max_shared_mem"]
        binary = given_binary(self._stored.binary, given, target, version, most_shared_bytes)
        # Of its own: it keeps what it launches.
        function = vars(load_source(self._stored.module, f"{self._named} from a cubin"))[self._stored.function]
        self._launch_binary(function, binary)
        return self._launching(function)

    def _launch_binary(self, function: Any, binary: StoredBinary) -> None:
        """Have a function launch a binary, for the arguments that it was compiled for."""
        named = self._named

        def stored(key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, warmup: Any) -> Any:
            """In place of Triton's compiler."""
            difference = binary.difference(signature, constants, attrs, vars(options))
            if difference:
                raise ReplayFailed(f"{named} is given what its binary was not compiled for: {difference}")
            kernel = binary.kernel(function.ASTSource(function, signature, constants, attrs))
            function.device_caches[device][0][key] = kernel
            return kernel

        function._do_compile = stored

    def _plain_launch(self) -> Callable[..., None] | None:
        """What `launch` does, as fast as Triton's own launcher, for a kernel whose parameters are the arguments of its
        schema, in the same order. None for others, and where the interpreter's own time hides that of a launch."""
        stored, parameters = self._stored, self._parameters
        positional = [each.name for each in self._schema.arguments if not each.kwarg_only]
        by_name = {*parameters[len(positional) :], *(name for name, _ in self._options), stored.grid}
        if (
            self._interpreted
            or any(form != name for name, form in stored.parameters.items())
            or any(given != name for name, given in self._options)
            or parameters[: len(positional)] != positional
            or stored.grid != "grid"
            or self._keywords
            or not {name for name, _ in self._dtypes} <= set(positional)
            or (self._several_devices and not self._dtypes)
        ):
            return None
        dtypes = [(positional.index(name), dtype) for name, dtype in self._dtypes]
        count, count_by_name = len(positional), len(by_name)
        grids, launch = self._grids, self.launch
        run = with_memory(partial(launcher_of(self._function), **self._compiled_with))
        current_device: Callable[[], int] | None = None
        if self._several_devices:
            import triton

            current_device = triton.runtime.driver.active.get_current_device

        def launch_plainly(*args: Any, **kwargs: Any) -> None:
            if (
                len(args) == count
                and len(kwargs) == count_by_name
                and tuple(kwargs["grid"]) in grids
                and (current_device is None or args[dtypes[0][0]].get_device() == current_device())
            ):
                for place, dtype in dtypes:
                    if args[place].dtype is not dtype:
                        break
                else:
                    run(*args, **kwargs)
                    return
            launch(*args, **kwargs)

        return launch_plainly

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """Launch it with the arguments of its schema. Raises ReplayFailed, before the launch, for those that it cannot
        be launched with."""
        values = dict(zip(self._names, args, strict=False))
        values.update(kwargs)
        try:
            grid = self._grid(values[self._stored.grid])
            for name, dtype in self._dtypes:
                if values[name].dtype is not dtype:
                    raise ReplayFailed(f"{self._named} takes a tensor of {dtype} as {name}, not {values[name].dtype}")
            parameters = self._assembly.assemble(values)
            given = self._compiled_with | {name: values[option] for name, option in self._options}
        except (AttributeError, KeyError) as error:
            raise ReplayFailed(f"{self._named} is not given what it takes ({error})") from None
        if self._keywords:
            given |= {self._parameters[place]: parameters[place] for place in self._keywords}
            parameters = parameters[: self._keywords.start]
        run = with_memory(self._function.run)
        with self._device(values):
            run(*parameters, grid=grid, warmup=False, **given)

    def _device(self, values: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """The current device has to be that of the tensors."""
        if not self._several_devices:
            return nullcontext()
        device = next((values[name].device for name, _ in self._dtypes if values[name].device.type != "cpu"), None)
        if device is None:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
        return context

    def _grid(self, sizes: Sequence[int]) -> tuple[int, ...]:
        grid = tuple(sizes)
        if grid in self._grids:
            return grid
        if not 1 <= len(grid) <= 3 or min(grid) < 0:
            raise ReplayFailed(f"{self._named} has the grid {list(grid)}; expected one to three sizes from 0 on")
        too_wide = not self._interpreted and max((0, *grid[1:])) > _MOST_FURTHER
        if prod(grid) > _MOST_PROGRAMS or too_wide:
            raise ReplayFailed(f"{self._named} has a grid of {prod(grid):,} programs, {list(grid)}, which is too large")
        self._grids.add(grid)
        return grid


@dataclass(frozen=True)
class InductorCppKernel(StoredCodeKernel):
    """A kernel whose code and schema go together; once it is loaded, it is ready to be called."""

    named: str
    declared: torch.FunctionSchema
    stored: StoredCppKernel
    arguments: tuple[CppArgument, ...]
    function: Callable[..., Any] | None = None
    how: str = ""

    def loaded(self) -> InductorCppKernel | str:
        try:
            function, how = _library_function(self.stored)
        except CannotLoad as error:
            return f"{self.named} cannot be called: {first_line(error)}"
        return replace(self, function=function, how=how)

    @property
    def schema(self) -> torch.FunctionSchema:
        return self.declared

    @property
    def call(self) -> Callable[..., Any]:
        assert self.function is not None, "it is called once it is loaded"
        return self.function

    def effects(self, layout: SlotLayout) -> Effects:
        return effects_of_schema(layout, self.declared, False)

    def runs_on(self, device_type: str) -> bool:
        return device_type == "cpu"

    def problem_with(self, dtypes: Sequence[torch.dtype | None]) -> str:
        pointers = [argument for argument in self.arguments if argument.dtype is not None]
        if len(pointers) != len(dtypes):
            return f"it takes {len(pointers)} tensors, and is given {len(dtypes)}"
        for argument, dtype in zip(pointers, dtypes, strict=True):
            if dtype != argument.dtype:
                return f"{argument.name} points to elements of {argument.dtype}, and is given {dtype}"
        return ""


def resolve_inductor_cpp(
    kernel: Kernel, contents: Callable[[], Mapping[str, bytes]], device_types: frozenset[str]
) -> ResolvedKernel | str:
    """The kernel of a capture whose code the user has allowed to run, or a sentence that says why there is none.
    `contents` are its attachments by role, `device_types` those that the replay uses."""
    named = kernel.qualified_name
    try:
        stored = StoredCppKernel.read(contents())
        arguments = stored.arguments
        if stored.source is not None and stored.variant() != kernel.overload:
            return f"{named}: its stored source is another than the one it is named after"
        if schema_of(kernel.name.partition("::")[2], kernel.overload, arguments) != kernel.schema:
            return f"{named}: its schema {kernel.schema[:200]!a} is not that of its source"
        schema = parse_schema(kernel.schema)
    except (RuntimeError, ValueError) as error:
        return f"{named} cannot be called: {first_line(error)}"
    return InductorCppKernel(named, schema, stored, arguments)


def _library_function(stored: StoredCppKernel) -> tuple[Callable[..., Any], str]:
    """The function of a kernel, and where its code is from. Raises CannotLoad."""
    different = differences(dict(stored.compiled_for))
    if stored.library is not None and not different:
        return load(stored.library), "run from the stored library"
    why = (
        f"its library is for another {', '.join(different)}"
        if stored.library is not None
        else "its library was left out"
    )
    if stored.source is None:
        raise CannotLoad(f"{why}, and its source is not in the capture")
    if not stored.flags:
        raise CannotLoad(f"{why}, and the capture does not say how its source was compiled")
    return load(compiled(stored.source, stored.flags)), f"compiled here from the stored source ({why})"
