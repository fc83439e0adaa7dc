"""Compiled regions under a capture: the C++ kernels that Inductor generates are recorded as ops.

`read_module` reads the Python module that Inductor generates for a region, `find_kernel` finds a kernel's source and
library, and `Regions` has the calls recorded. CUDA graphs that Inductor makes of its regions (`mode="reduce-overhead"`)
are switched off meanwhile.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from replayfmt.format.codes import KernelKind
from replayfmt.format.validation import tell
from replayfmt.pytorch.cpp_kernels import (
    ENTRY,
    StoredCppKernel,
    machine_of_code,
    parameters_of,
    parse_parameters,
    schema_of,
    without_paths,
)
from replayfmt.pytorch.tensors.memory import storage_of

from .frames import codes_in, is_interrupt, leave_no_frames, outwards
from .kernels import Attached, CapturedKernel, CodeKernel
from .patches import HookHost
from .storages.trackers import GENERATED
from .stream.program_state import watched_indices
from .stream.records import Unrepresentable
from .stream.session import Session

# Functions of a generated module that run no region.
_ASIDE = frozenset({"get_args", "benchmark_compiled_module"})
_RUNNER = "Runner"
_RUNNERS_OWN = frozenset({"__init__", "recursively_apply_fns"})
_DECLARING = "async_compile.cpp_pybinding"
_CPP_WRAPPER = "CppWrapperCodeCache."
# What Inductor declares at the top of a module, other than C++ kernels.
_OTHERS = frozenset({"async_compile.triton"})
# Methods of tensors that are operators, or look at metadata, those of lists, and those of events.
_METHODS = frozenset(
    {"clone", "contiguous", "copy_", "fill_", "item", "numel", "size", "storage_offset", "stride", "unsqueeze", "zero_"}
    | {"any", "isinf", "isnan"}
    | {"append", "clear", "extend"}
    | {"record", "synchronize"}
)
_HARMLESS = (
    "assert_size_stride",
    "assert_size_stride_grouped",
    "assert_alignment",
    "_reinterpret_tensor",
    "copy_if_misaligned",
)
_ALLOCATING = ("_empty_strided_cpu", "_empty_strided_cpu_pinned", "_empty_strided_cuda", "_empty_strided_xpu")
_COUNTING = (abs, bool, divmod, float, int, isinstance, len, list, max, min, pow, print, range, round, sum, tuple)
_RAISED = (AssertionError, RuntimeError)
_MAKING = (torch.device, torch.Event)  # an event is recorded where it is used
# Where Inductor keeps functions that call operators alone.
_OF_OPERATORS = frozenset(f"torch._inductor.kernel.{name}" for name in ("bmm", "conv", "mm", "mm_plus_mm"))
_LAUNCHER = ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner")
# Which device and which stream the code works on.
_PLACING = (
    ("torch._C", ("_cuda_getCurrentRawStream", "_xpu_getCurrentRawStream")),
    ("torch.cuda", ("_DeviceGuard", "set_device", "synchronize")),
    ("torch.xpu", ("_DeviceGuard", "set_device", "synchronize")),
)
_CHECKING = ("torch._inductor.runtime.runtime_utils", ("assert_tensor_metadata",))
_SCOPE = "from torch.profiler import record_function"  # in the text of a function
_HOOKS = ("torch._inductor.hooks", "run_intermediate_hooks")


class Unknown(Exception):
    """The module does something that is not known."""


@dataclass(frozen=True)
class DeclaredKernel:
    """A C++ kernel that a module declares. `types`: those of its parameters; `source`: what Inductor wrote."""

    name: str
    types: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class ModuleText:
    """What the text of a module says. `kernels`: its C++ kernels; `allocators`: names of functions that allocate."""

    kernels: tuple[DeclaredKernel, ...]
    allocators: tuple[str, ...]


def read_module(text: str, namespace: Mapping[str, Any], running: CodeType) -> ModuleText:
    """Read a generated module, whose globals are `namespace`; `running` is the code of the function that is called.
    Raises Unknown."""
    try:
        tree = ast.parse(text)
        compiled = compile(text, "<generated>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise Unknown(f"its text is no Python ({error}): it runs beneath Python, or was not kept") from error
    if running not in set(codes_in(compiled)):
        raise Unknown("what runs is not what its text says")
    kernels = tuple(_declared(tree))
    reader = _Reader(namespace, frozenset(kernel.name for kernel in kernels))
    for function in _functions(tree):
        reader.read(function)
    return ModuleText(kernels, tuple(sorted(reader.allocators)))


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions that a region may run."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in _ASIDE:
            yield node
        elif isinstance(node, ast.ClassDef):
            if node.name != _RUNNER:
                raise Unknown(f"it defines the class {node.name}")
            yield from (
                each for each in node.body if isinstance(each, ast.FunctionDef) and each.name not in _RUNNERS_OWN
            )


def _declared(tree: ast.Module) -> Iterator[DeclaredKernel]:
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        callee = ast.unparse(node.value.func)
        if callee.startswith(_CPP_WRAPPER):
            raise Unknown("its wrapper is C++ (cpp_wrapper), which runs beneath Python")
        if callee.startswith("async_compile.") and callee not in {_DECLARING, *_OTHERS}:
            raise Unknown(f"it declares a kernel by {callee}")
        if callee != _DECLARING:
            continue
        target = node.targets[0]
        try:
            types, source = (ast.literal_eval(argument) for argument in node.value.args)
        except ValueError as error:
            raise Unknown(f"line {node.lineno} declares a kernel in an unknown way") from error
        if not isinstance(target, ast.Name) or not isinstance(source, str) or node.value.keywords:
            raise Unknown(f"line {node.lineno} declares a kernel in an unknown way")
        yield DeclaredKernel(target.id, tuple(types), source)


class _Reader:
    """Looks at the calls of a module's functions."""

    def __init__(self, namespace: Mapping[str, Any], kernels: frozenset[str]) -> None:
        self._namespace = namespace
        self._kernels = kernels
        guards = torch._C._dynamo.guards
        self._harmless = [
            getattr(holder, name)
            for holder, names in [
                (guards, _HARMLESS),
                *((sys.modules.get(module), names) for module, names in (*_PLACING, _CHECKING)),
            ]
            for name in names
            if hasattr(holder, name)
        ]
        self._allocating = [getattr(guards, name) for name in _ALLOCATING if hasattr(guards, name)]
        self.allocators: set[str] = set()

    def read(self, function: ast.FunctionDef) -> None:
        """Raises Unknown."""
        own = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        own |= {
            each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        imports = [each for each in ast.walk(function) if isinstance(each, ast.ImportFrom)]
        marks = bool(imports) and all(ast.unparse(each) == _SCOPE for each in imports) and "record_function" not in own
        for node in ast.walk(function):
            if marks and (node in imports or (isinstance(node, ast.Call) and _path(node.func) == ["record_function"])):
                continue
            if isinstance(node, (ast.Global, ast.Import, ast.ImportFrom, ast.ClassDef, ast.Lambda, ast.Await)):
                raise Unknown(f"line {node.lineno} of its text is of an unknown kind ({type(node).__name__})")
            if isinstance(node, ast.Call) and not self._is_known(node.func, own):
                raise Unknown(f"line {node.lineno} of its text calls {ast.unparse(node.func)[:80]}, which is not known")

    def _is_known(self, callee: ast.expr, own: set[str]) -> bool:
        if isinstance(callee, ast.Attribute) and _local(self._viewed(callee.value)) in own:
            return callee.attr in _METHODS
        if isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Constant):
            return callee.attr == "format"
        path = _path(callee)
        if not path:
            return ast.unparse(callee).startswith("self.partitions[")
        if path[0] in own:
            return False
        if len(path) == 1 and path[0] in self._kernels:
            return True
        value: Any = self._namespace.get(path[0], getattr(builtins, path[0], None))
        holder = None
        for name in path[1:]:
            holder, value = value, getattr(value, name, None)
        if any(value is function for function in self._allocating):
            self.allocators.add(".".join(path))
            return len(path) == 1
        return self._is_known_value(value, holder, path)

    def _viewed(self, value: ast.expr) -> ast.expr:
        """What a view is of: `buf1` for `reinterpret_tensor(buf1, …)`; anything else itself."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.args:
            called = self._namespace.get(value.func.id)
            if called is getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None) is not None:
                return value.args[0]
        return value

    def _is_known_value(self, value: Any, holder: Any, path: list[str]) -> bool:
        if value is None:
            return False
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return True
        if (
            any(value is each for each in (*self._harmless, *_COUNTING, *_RAISED, *_MAKING))
            or getattr(math, path[-1], None) is value
        ):
            return True
        if isinstance(value, (BuiltinFunctionType, type(torch.mm))) and _is_operators(value, path[-1]):
            return True
        if isinstance(value, FunctionType):
            home = value.__module__
            return home in _OF_OPERATORS or value.__globals__ is self._namespace or (home, path[-1]) == _HOOKS
        if path[-1] == "run" and holder is not None:
            launcher = getattr(sys.modules.get(_LAUNCHER[0]), _LAUNCHER[1], None)
            return launcher is not None and isinstance(holder, launcher)
        return False


def _is_operators(function: Any, name: str) -> bool:
    """Whether it is one of PyTorch's functions that call an operator (`torch.mm`)."""
    places = (torch._C._VariableFunctions, torch._C._nn, getattr(torch._C, "_linalg", None))
    return any(getattr(place, name, None) == function for place in places)


def _path(callee: ast.expr) -> list[str]:
    """["extern_kernels", "mm"] for `extern_kernels.mm`; empty for what is no path of names."""
    names: list[str] = []
    while isinstance(callee, ast.Attribute):
        names.append(callee.attr)
        callee = callee.value
    return [*names, callee.id][::-1] if isinstance(callee, ast.Name) else []


def _local(value: ast.expr) -> str:
    """`buf1` for `buf1`, for its elements, and for what their methods return; empty for anything else."""
    while not isinstance(value, ast.Name):
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            value = value.func.value
        else:
            return ""
    return value.id


Function = Callable[..., Any]
_LIBRARY, _SOURCE = ".main.so", ".main.cpp"


class InductorCode(CodeKernel):
    """A C++ kernel."""

    __slots__ = ("native",)

    def __init__(self, schema: str, call: Function, attached: Iterable[Attached]) -> None:
        super().__init__(KernelKind.inductor_cpp, schema, call, attached)
        self.native: Any = None

    def use_native(self, session: Session) -> None:
        """Have calls that hold nothing new recorded without Python, where that is possible."""
        if self.native is None:
            watches = watched_indices(self.name)
            self.native = session.generated_kernel(self.schema, list(self.writes), list(watches))

    def recorded(self, args: tuple[Any, ...], signature: int) -> None:
        if self.native is not None:
            self.native.learn(args, signature)

    def reads(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        storage = storage_of(args[index])
        if not hasattr(storage, GENERATED):
            return True  # what it does not write of a tensor has to be what it was
        # A fused kernel reads what it has written itself: then it is given the same memory for a written argument.
        return all(storage_of(args[i])._cdata != storage._cdata for i in self.writes)


class Allocation(CapturedKernel):
    """`aten::empty_strided`, run by one of PyTorch's functions that allocate without the dispatcher."""

    __slots__ = ("_allocate",)

    def __init__(self, allocate: Function) -> None:
        super().__init__(torch.ops.aten.empty_strided.default)
        self._allocate = allocate
        self.call = self._run

    def _run(self, size: list[int], stride: list[int], *, dtype: torch.dtype, **_options: Any) -> torch.Tensor:
        # PyTorch's function takes tuples alone, and sizes in an op's record are lists.
        result = self._allocate(tuple(size), tuple(stride), dtype)
        self.ran(result)
        return result

    def ran(self, result: Any) -> None:
        setattr(storage_of(result), GENERATED, True)


def find_kernel(declared: DeclaredKernel, function: Any) -> InductorCode:
    """The kernel that `function` is, to which a declaration led. Raises Unknown."""
    name = declared.name
    library = Path(getattr(getattr(function, "__self__", None), "__file__", None) or "")
    if getattr(function, "__name__", "") != ENTRY or not library.name.endswith(_LIBRARY):
        raise Unknown(f"{name} is not a function that Inductor compiled")
    try:
        source = library.with_name(library.name.removesuffix(_LIBRARY) + _SOURCE).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Unknown(f"the source of {name} cannot be read ({error})") from error
    if not source.startswith(declared.source):
        raise Unknown(f"the source of {name} beside its library is not the one in the module")
    try:
        content = without_paths(library.read_bytes())
        parameters = parameters_of(source)
        arguments = parse_parameters(parameters)
    except (OSError, ValueError) as error:
        raise Unknown(f"what {name} takes is not known: {error}") from error
    if [argument.passed_as for argument in arguments] != [each.replace("const ", "") for each in declared.types]:
        raise Unknown(f"{name} is called with other arguments than its source takes")
    stored = StoredCppKernel(parameters, source, content, _flags(source, library), machine_of_code())
    attached = [Attached(role, name, content) for role, content in stored.contents().items()]
    try:
        schema = schema_of(name, stored.variant(), arguments)
        return InductorCode(schema, function, attached)
    except Unrepresentable as problem:
        raise Unknown(f"{name}: {problem.detail}") from problem


def _flags(source: str, library: Path) -> tuple[str, ...]:
    """The flags that a library was compiled with, without paths; empty if they are not known. Inductor names a library
    after its source and its command, so the name tells whether what it would choose now is what it chose then."""
    cache: Any = sys.modules["torch._inductor.codecache"]
    builder: Any = sys.modules["torch._inductor.cpp_builder"]
    isa: Any = sys.modules["torch._inductor.cpu_vec_isa"]
    kinds = [isa.pick_vec_isa(), getattr(isa, "invalid_vec_isa", None)]
    for kind in kinds:
        options = builder.CppTorchDeviceOptions(
            vec_isa=kind, include_pytorch=False, shared=True, device_type="cpu", extra_flags=(), use_relative_path=False
        )
        line = builder.CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
        if cache.get_hash(source.strip(), f"None {line}", "code") == library.name.removesuffix(_LIBRARY):
            return _words(options)
    return ()


def _words(options: Any) -> tuple[str, ...]:
    """The words of a command, without directories."""
    texts = [
        *(f"-D{each.strip()}" for each in options.get_definitions()),
        *(f"-{each}" for each in options.get_cflags()),
        *(word for each in options.get_passthrough_args() for word in each.split()),
        *(f"-{each}" for each in options.get_ldflags()),
        *(f"-l{each}" for each in options.get_libraries()),
    ]
    return tuple(texts)


_MODULE = "torch._inductor.compile_fx"
_GRAPHED = "cudagraphify.<locals>.run"
_BACKWARD = "maybe_handle_backward_generation.<locals>.compiled_artifact"  # tells the trees that a backward pass runs
_NOTE = (
    "CUDA graphs of compiled regions are switched off while they are recorded: their kernels are launched one by one, "
    "and take longer"
)


def graph_policies(compiled: str) -> dict[str, str]:
    """What the session says of it."""
    torch = sys.modules["torch"]
    return {"cudagraph-trees": "off"} if compiled == "kernels" and torch.backends.cuda.is_built() else {}


class GraphsSwitchedOff:
    """What one capture has put in the place of functions that replay graphs."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Callable[[], Any], Any, Any, Any]] = []

    def switch_off(self, region: Any) -> None:
        """Have a region run its generated functions."""
        called, runner = getattr(region, "current_callable", None), getattr(region, "compiled_fn_runner", None)
        plain = without_graph(called)
        partitions = getattr(runner, "partitions", None) or []
        graphed = [index for index, each in enumerate(partitions) if without_graph(each) is not each]
        if plain is called and not graphed:
            return
        if not self._replaced:
            tell(f"opreplay: {_NOTE}")
        for index in graphed:
            before, partitions[index] = partitions[index], without_graph(partitions[index])
            self._replaced.append((weakref.ref(runner), index, before, partitions[index]))
        if plain is not called:
            region.current_callable = plain
            # A graph copies its inputs to where their memory is aligned; the generated code wants them to be.
            output_code: Any = sys.modules["torch._inductor.output_code"]
            output_code.maybe_realign_inputs(False, region, region.inputs_to_check, region.mutated_input_idxs)
            self._replaced.append((weakref.ref(region), None, called, region.current_callable))

    def put_back(self) -> None:
        """What others have replaced since then is left alone."""
        while self._replaced:
            found, index, original, replacement = self._replaced.pop()
            holder = found()
            if holder is None:
                continue
            if index is None:
                if holder.current_callable is replacement:
                    holder.current_callable = original
            elif len(holder.partitions) > index and holder.partitions[index] is replacement:
                holder.partitions[index] = original


def without_graph(function: Any) -> Any:
    """The function that runs while a graph is captured of it; the function itself if it replays none."""
    for module, name, variable in (
        ("torch._inductor.output_code", _BACKWARD, "compiled_graph_callable"),
        (_MODULE, _GRAPHED, "model"),
    ):
        if getattr(function, "__qualname__", "") == name and function.__module__ == module:
            function = function.__closure__[function.__code__.co_freevars.index(variable)].cell_contents
    return function


# Functions around a generated one, and the variable in which each has it.
_AROUND = {
    "align_inputs_from_check_idxs.<locals>.run": "model",  # copies arguments whose memory is not aligned, by operators
    "CompiledFxGraph.post_compile.<locals>.wrapped_callable": "original_callable",  # makes it an operator for modes
}


class Regions:
    def __init__(self, recorder: HookHost) -> None:
        self._recorder = recorder
        self._modules: dict[int, tuple[dict[str, Any], str]] = {}  # by identity: its globals, and what is unknown
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._kernels: dict[tuple[str, str], InductorCode] = {}
        self._graphs = GraphsSwitchedOff()
        # By a region's identity: the region, and what it called when it was last opened.
        self._opened: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def opened(self, region: Any) -> bool:
        """Whether all that a region calls is recorded, as `open` found before."""
        found = self._opened.get(id(region))
        return found is not None and found[1] is region.current_callable and found[0]() is region

    def open(self, region: Any) -> str:
        """Have the calls of a region recorded. Returns why they cannot be, or ""."""
        try:
            function = _function(region)
        except Unknown as problem:
            return str(problem)
        namespace = function.__globals__
        known = self._modules.get(id(namespace))
        if known is None:
            unknown, replaced = "", len(self._replaced)
            try:
                self._replace(region, namespace, function)
            except BaseException as error:
                interrupt = next((each for each in (error, error.__cause__) if is_interrupt(each)), None)
                if interrupt is not None:
                    self._put_back(replaced)  # the next call finds the module as this one did
                    raise interrupt  # noqa: B904 - it is the program's
                # Of another PyTorch, say: then it is recorded as if nothing were known of it.
                unknown = (
                    str(error)
                    if isinstance(error, Unknown)
                    else f"its text could not be read: {type(error).__name__}: {error}"
                )
            known = self._modules[id(namespace)] = namespace, unknown
        if not known[1]:
            self._graphs.switch_off(region)
            number = id(region)
            forget = weakref.ref(region, lambda _: self._opened.pop(number, None))
            self._opened[number] = forget, region.current_callable
        return known[1]

    def close(self) -> None:
        """Put everything back. What others have replaced since then is left alone."""
        self._graphs.put_back()
        self._put_back(0)
        self._modules.clear()
        self._opened.clear()

    def _put_back(self, kept: int) -> None:
        """What was replaced after the first `kept` replacements."""
        while len(self._replaced) > kept:
            namespace, name, original, replacement = self._replaced.pop()
            if namespace.get(name) is replacement:
                namespace[name] = original

    def _replace(self, region: Any, namespace: dict[str, Any], function: FunctionType) -> None:
        text = read_module(region.source_code, namespace, function.__code__)
        new: dict[str, Function] = {}
        for declared in text.kernels:
            kernel = find_kernel(declared, namespace.get(declared.name))
            known = self._kernels.setdefault((kernel.name, kernel.overload), kernel)
            new[declared.name] = self._recording(kernel.call, known)
        for name in text.allocators:
            new[name] = self._allocating(namespace[name])
        for name, replacement in new.items():
            self._replaced.append((namespace, name, namespace[name], replacement))
            namespace[name] = replacement

    def _recording(self, original: Function, kernel: InductorCode) -> Function:
        @functools.wraps(original)
        def call(*args: Any) -> Any:
            try:
                return self._recorder.issue(kernel, args, {})
            except BaseException as error:
                leave_no_frames(error)
                raise

        kernel.use_native(self._recorder.session)
        caller: Function = kernel.native.caller(kernel, original, call)
        return caller

    def _allocating(self, original: Function) -> Function:
        kernel = Allocation(original)
        kind = _DEVICES.get(original.__name__, "cpu")
        pinned = original.__name__.endswith("_pinned")

        @functools.wraps(original)
        def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            device = (
                torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
            )
            given = {"dtype": dtype, "device": device, "pin_memory": pinned}
            try:
                result: torch.Tensor = self._recorder.issue(kernel, (list(size), list(stride)), given)
            except BaseException as error:
                leave_no_frames(error)
                raise
            return result

        return self._recorder.session.allocator(kernel, original, allocate, kind, pinned) or allocate


_DEVICES = {"_empty_strided_cuda": "cuda", "_empty_strided_xpu": "xpu"}


def running_regions() -> list[Any]:
    """The regions that some thread is in the middle of."""
    graph = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
    code = None if graph is None else inspect.unwrap(graph.__call__).__code__
    found = []
    for innermost in sys._current_frames().values() if code is not None else ():
        found += [frame.f_locals["self"] for frame in outwards(innermost) if frame.f_code is code]
    return found


def _function(region: Any) -> FunctionType:
    """The function that a region runs. Raises Unknown."""
    called = without_graph(getattr(region, "current_callable", None))
    while getattr(called, "__qualname__", "") in _AROUND:
        called = called.__closure__[called.__code__.co_freevars.index(_AROUND[called.__qualname__])].cell_contents
    runner: Any = getattr(region, "compiled_fn_runner", None)
    if runner is not None and called != runner.call:
        raise Unknown(f"it is called through {getattr(called, '__qualname__', type(called).__name__)}, not by itself")
    for part in getattr(runner, "partitions", None) or ():
        if not isinstance(without_graph(part), FunctionType | MethodType):
            raise Unknown(f"a part of it is {type(part).__name__}, which is not known")
        if without_graph(part).__globals__ is not runner.call.__globals__:
            raise Unknown(f"a part of it is called through {part.__qualname__}, not by itself")
    function = called.__func__ if isinstance(called, MethodType) else called
    if not isinstance(function, FunctionType):
        raise Unknown(f"it is {type(function).__name__}, which runs beneath Python")
    return function
