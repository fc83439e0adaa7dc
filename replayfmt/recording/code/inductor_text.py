"""Reads the Python module that Inductor generates for a region.

The module's functions allocate memory, call kernels and operators, and do nothing else. This is not taken for granted:
each call in their text must be of a kind listed here. If one is not, the region is recorded as unsupported, as a whole.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch

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
    if running not in set(_codes(compiled)):
        raise Unknown("what runs is not what its text says")
    kernels = tuple(_declared(tree))
    reader = _Reader(namespace, frozenset(kernel.name for kernel in kernels))
    for function in _functions(tree):
        reader.read(function)
    return ModuleText(kernels, tuple(sorted(reader.allocators)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


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
