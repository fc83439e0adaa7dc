"""A C++ kernel that Inductor compiled: its source, its library, and how it was compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from replayfmt.format.codes import KernelKind
from replayfmt.pytorch.inductor.code_machine import machine_of_code
from replayfmt.pytorch.inductor.cpp_kernels import ENTRY, StoredCppKernel, parameters_of, parse_parameters, schema_of
from replayfmt.pytorch.inductor.library_paths import without_paths
from replayfmt.pytorch.tensors.looks import storage_of

from ..dispatch.kernels import CapturedKernel
from ..state.numeric_state import watched_indices
from ..storages.trackers import GENERATED
from ..stream.records import Unrepresentable
from .inductor_text import DeclaredKernel, Unknown
from .kernels import Attached, CodeKernel

Function = Callable[..., Any]
_LIBRARY, _SOURCE = ".main.so", ".main.cpp"


class InductorCode(CodeKernel):
    """A C++ kernel. `reads`: of each argument, whether it is read; None: unless generated code has just allocated its
    memory."""

    __slots__ = ("_reads", "native")

    def __init__(self, schema: str, call: Function, attached: Iterable[Attached], reads: Sequence[bool | None]) -> None:
        super().__init__(KernelKind.inductor_cpp, schema, call, attached)
        self._reads = tuple(reads)
        self.native: Any = None

    def use_native(self, session: Any) -> None:
        """Have calls that hold nothing new recorded without Python. `session`: a `Session` of native/session.h."""
        if self.native is None:
            watches = watched_indices(self.name)
            self.native = session.generated_kernel(self.schema, list(self.writes), list(watches), list(self._reads))

    def recorded(self, args: tuple[Any, ...], signature: int) -> None:
        if self.native is not None:
            self.native.learn(args, signature)

    def reads(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        reads = self._reads[index]
        if reads is False:
            return False
        storage = storage_of(args[index])
        if not hasattr(storage, GENERATED):
            return True
        # A fused kernel reads what it has written itself: then it is given the same memory for a written argument.
        return reads is not None and all(storage_of(args[i])._cdata != storage._cdata for i in self.writes)


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
        return InductorCode(schema, function, attached, [argument.read for argument in arguments])
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
