"""What the recorder knows about a kernel before it sees a call.

`CapturedKernel` describes an operator overload, computed once from its schema, from `replayfmt.pytorch.operators`, and
from who registered its kernels: the program may have replaced those of PyTorch. `CodeKernel` describes code of the
program that is no operator (a Triton kernel, a kernel of Inductor's, a graph): it has a schema that says what it reads
and writes, and attachments such as its source.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunction

from replayfmt.errors import first_line
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.format.operator_schema import name_problem
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch import operators
from replayfmt.pytorch.operators import ACCUMULATES, OpaqueResults, is_pytorchs, tells_allocator, tells_build
from replayfmt.pytorch.overloads import parse_schema, printed_schema, takes_numbers
from replayfmt.pytorch.tensors.memory import tensors_in

from .composite_operators import AsInProgram, Body, CompositeDecomposition, is_composite_operator, own_backends
from .stream.records import Unrepresentable

_TRACER: Any = torch._C._parse_dispatch_key("Tracer")
_KEYS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_PYTORCH = os.path.dirname(torch.__file__) + os.sep
_FOR_PROGRAMS = os.path.join(_PYTORCH, "library.py")  # where `torch.library.impl` registers what programs give it
# As the dispatcher prints a kernel that is in use, and where PyTorch's own in C++ are registered, in any build of it.
_KERNEL = re.compile(rf"^({'|'.join(_KEYS)})(?:\[alias\])?: (?:fallthrough )?registered at (.*?):\d+", re.MULTILINE)
_IN_PYTORCHS_SOURCE = re.compile(r"(?:^|/)(?:aten/src/ATen|torch/csrc)/")


def is_replaced(name: str) -> bool:
    """Whether the program has a kernel of its own for one of PyTorch's operators (`aten::mul.Tensor`)."""
    return any(kernel_is_programs(name, key) for key in _KEYS)


def kernel_is_python(name: str, key: str) -> bool:
    """Whether the kernel of any operator for a dispatch key is a Python function."""
    operator = name.replace("::", "/")
    keys = (key, "") if key == "CompositeImplicitAutograd" else (key,)
    return any(f"{operator}/{each}" in torch.library._impls for each in keys)


def kernel_is_programs(name: str, key: str) -> bool:
    """Whether the kernel for a dispatch key is such a kernel."""
    if not kernel_is_python(name, key):
        return key in _replaced_in_cpp(name)
    place = _places(name).get(key)
    return place is not None and (place == _FOR_PROGRAMS or not place.startswith(_PYTORCH))


def forget_libraries() -> None:
    """A library was loaded, which may have registered kernels."""
    _replaced_in_cpp.cache_clear()


@functools.cache
def _replaced_in_cpp(name: str) -> frozenset[str]:
    """The keys for which an extension has a kernel. (Asking the dispatcher takes 50 us.)"""
    return frozenset(
        key
        for key, place in _places(name).items()
        if not (place.startswith(_PYTORCH) or _IN_PYTORCHS_SOURCE.search(place))
    )


def _places(name: str) -> dict[str, str]:
    """Where the kernels of an operator were registered, by dispatch key."""
    return dict(_KERNEL.findall(torch._C._dispatch_dump(name)))


class Action(Enum):
    """What the mode does with a call."""

    record = 1
    ignore = 2  # run it, record nothing
    decompose = 3  # a PyTorch composite that reached the mode: its parts are recorded
    collective = 4  # its launch and the wait for it are recorded, or that it cannot be reproduced
    scope_enter = 5  # torch.profiler.record_function
    scope_exit = 6
    stream_use = 7  # record_stream: says that a stream uses memory


_KNOWN_OPAQUE = OpaqueResults()


@dataclass(frozen=True)
class Argument:
    name: str
    written: bool
    keyword_only: bool


_NAMES_STATE = re.compile(r"(\A|_)(handle|ptr|pointer|manager|comm)\Z")


class CapturedKernel:
    """One operator overload. `id` is its kernel id in the capture, 0 until a call of it is recorded."""

    assumed: tuple[int, ...] = ()  # the arguments that count as written because nothing tells whether they are

    __slots__ = (
        "accumulates_at",
        "action",
        "arguments",
        "body",
        "call",
        "dropout",
        "elementwise",
        "func",
        "id",
        "in_place_view",
        "indices",
        "operator",
        "mixed_lists",
        "name",
        "namespace",
        "only_with",
        "opaque_results",
        "own",
        "own_kernels",
        "parts",
        "random",
        "reads_nothing",
        "results",
        "state_argument",
        "tensor_places",
        "unnameable",
        "view",
        "writes",
    )

    def __init__(self, func: torch._ops.OpOverload, opaque: OpaqueResults = _KNOWN_OPAQUE) -> None:
        schema = func._schema
        self.func = func
        self.id = 0
        self.name = schema.name
        self.namespace, _, base = schema.name.partition("::")
        operator = self.operator = operators.operator_named(self.name, self.overload)
        self.own = operator.own
        self.unnameable = name_problem(self.name, self.overload)
        self.call = caller_of(func)
        types = {a.name: str(a.type) for a in schema.arguments}
        quiet = operators.unannotated_writes(
            self.name, self.overload, [name for name, text in types.items() if "Tensor" in text]
        )
        self.arguments = tuple(
            Argument(a.name, a.name in quiet or (a.alias_info is not None and a.alias_info.is_write), a.kwarg_only)
            for a in schema.arguments
        )
        self.indices = {a.name: index for index, a in enumerate(self.arguments)}
        only = operator.only_with
        self.only_with = None if only is None else (self.indices[only[0]], self.indices[only[1]])
        # Lists of numbers of any type: [1], [1.0] and [True] compare equal but compute different results.
        self.mixed_lists = any("List[number]" in text for text in types.values())
        self.tensor_places = tensor_places(func)
        # The integer by which it finds state of its library that another operator made.
        found = [name for name, text in types.items() if text == "int" and _NAMES_STATE.search(name)]
        self.state_argument = found[0] if found and not self.own else None
        self.results = len(schema.returns)
        self.view = func.is_view
        self.in_place_view = torch.Tag.inplace_view in func.tags
        self.reads_nothing = self.view or operator.reads_nothing or self.in_place_view
        # An in-place view writes nothing: it changes metadata, not memory.
        self.writes = () if self.in_place_view else tuple(i for i, a in enumerate(self.arguments) if a.written)
        # It returns new tensors, whose elements depend only on the arguments' elements.
        self.elementwise = operator.own and torch.Tag.pointwise in func.tags and not self.writes and not self.view
        self.accumulates_at = tuple(i for i, a in enumerate(self.arguments) if a.name in ACCUMULATES)
        self.random = (
            torch.Tag.nondeterministic_seeded in func.tags
            or not operator.own
            or any("Generator" in text for text in types.values())
        )
        # Attention draws random numbers only with dropout.
        self.dropout = self.indices.get("dropout_p", -1) if self.namespace == "aten" else -1
        self.opaque_results = tuple(opaque.of(schema.name, self.overload, self.results))
        self.action = self._choose_action(base)
        self.parts = CompositeDecomposition(func) if self.action is Action.decompose else None
        self.body: Body | None = None
        self.find_kernels()

    def find_kernels(self) -> bool:
        """Find out what is registered for it now. Returns whether calls may have to be recorded in another way since
        the last time."""
        name, had = self.func.name(), self.body is not None
        if self.own:
            self.body = Body(self.func, kernel_is_programs) if is_replaced(name) else None
        elif not had and self.action is Action.record and not is_pytorchs(self.namespace) and not self.unnameable:
            self.body = Body(self.func, kernel_is_python)
        own = own_backends(name) if self.parts is not None else ()
        self.own_kernels = tuple(getattr(torch._C.DispatchKey, backend) for backend in own)
        return self.body is not None and not had

    def _choose_action(self, base: str) -> Action:
        if self.unnameable:
            return Action.record  # PyTorch itself cannot be asked about it
        if self.namespace == "profiler":
            if base.startswith("_record_function_enter"):
                return Action.scope_enter
            return Action.scope_exit if base.startswith("_record_function_exit") else Action.ignore
        if tells_allocator(self.name):  # FSDP's does nothing where freeing memory is no work of the device
            return Action.stream_use if self.namespace == "aten" else Action.ignore
        if self.name == "_c10d_functional::_wrap_tensor_autograd":
            return Action.ignore  # it wraps a tensor, in Python
        if self.operator.collective:
            return Action.collective
        if self.operator.maps_files:
            return Action.ignore  # what it returns is imported at its first use, like memory mapped before the capture
        if not self.arguments and "Tensor" not in str(self.func._schema) and tells_build(self.name):
            return Action.ignore  # a replay needs no library only because the program asked for its version
        if self.operator.in_parts and is_composite_operator(self.func.name()):
            return Action.decompose
        return Action.record

    def has_own_kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the dispatcher runs this composite as one kernel for these arguments, rather than in parts."""
        if not self.own_kernels:
            return False
        keys = [torch._C._dispatch_keys(tensor) for tensor in tensors_in((*args, *kwargs.values()))]
        return any(given.has(key) for given in keys for key in self.own_kernels)

    @property
    def overload(self) -> str:
        return str(self.func._schema.overload_name or "default")

    @property
    def schema(self) -> str:
        return printed_schema(self.func._schema)

    def definition(self, writer: CaptureWriter) -> Kernel:
        """The kernel's definition in a capture."""
        return Kernel(self.name, self.overload, self.schema)

    def argument(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value that a call passes for an argument; None if it uses the schema's default."""
        if index < len(args):
            return args[index]
        return kwargs.get(self.arguments[index].name)

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call may draw random numbers."""
        return self.random and (self.dropout < 0 or bool(self.argument(self.dropout, args, kwargs)))

    def reads(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call reads bytes of the tensors in its argument `index`."""
        if self.reads_nothing:
            return False
        argument = self.arguments[index]
        if argument.written and argument.keyword_only and self.namespace == "aten":
            return False  # an out= argument
        operator = self.operator
        if argument.name in operator.unread or not self._counts(index, args, kwargs):
            return False
        if operator.unread_with is not None and argument.name == operator.unread_with[0]:
            return not self.argument(self.indices[operator.unread_with[1]], args, kwargs)
        if argument.name in operator.read_for_result:
            flags, place = operator.read_for_result[argument.name]
            wanted = self.argument(self.indices[flags], args, kwargs)
            return not isinstance(wanted, list | tuple) or bool(wanted[place])
        if index == 0:
            if operator.overwrites_self or operator.packs:
                return False
            if operator.writes_some:
                return any(self.argument(i, args, kwargs) for i in self.accumulates_at)
            if operator.beta:
                beta = kwargs.get("beta", 1)
                return not (isinstance(beta, (int, float)) and beta == 0)
        if operator.like_other:
            return index == 0
        return not self._computes_nothing(args, kwargs)

    @staticmethod
    def _computes_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is for the meta device, which has no content."""
        device = kwargs.get("device")
        given = tensors_in((*args, *kwargs.values()))
        return (device is not None and torch.device(device).type == "meta") or any(tensor.is_meta for tensor in given)

    def recorded(self, args: tuple[Any, ...], signature: int) -> None:
        """A call of it on the complete path was recorded."""

    def ran(self, result: Any) -> None:
        """It ran, other than through `call`."""

    def found_to_change(self, changed: Iterable[int]) -> CapturedKernel:
        """The kernel of a call that changed the content of these of the assumed arguments, and of no others."""
        raise NotImplementedError("an operator's schema tells what it writes")

    def writes_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The arguments that this call writes."""
        if self.only_with is None:
            return self.writes
        return tuple(index for index in self.writes if self._counts(index, args, kwargs))

    def _counts(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call uses an argument at all, beyond its shape."""
        if self.only_with is None or index != self.only_with[0]:
            return True
        return bool(self.argument(self.only_with[1], args, kwargs))

    def writes_all(self, index: int) -> bool:
        """Whether a call that writes its argument `index` writes every element of it."""
        return not (self.operator.writes_some and index == 0) and not self.operator.writes_a_part


def tensor_places(func: torch._ops.OpOverload) -> tuple[int, ...]:
    """The places where a number may come instead of a tensor, though a call from Python does not accept one."""
    if takes_numbers(func):
        return ()
    return tuple(index for index, a in enumerate(func._schema.arguments) if isinstance(a.type, torch.TensorType))


def caller_of(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function that calls an overload from inside the mode's handler as the program would have called it."""
    # No `__torch_function__` sees a call that arrives at the dispatch mode, so none may see it leave.
    name, overload = func._schema.name, func._schema.overload_name or "default"
    if name == "aten::convolution":
        return traced(unheard(func))
    if operators.operator_named(name).own or name_problem(name, overload):
        return unheard(func)
    return AsInProgram(func, unheard(func))


def traced(call: Callable[..., Any]) -> Callable[..., Any]:
    """`aten::convolution`, which torch.jit.trace does not note: it notes an operator that is called inside. For what a
    dispatch mode calls, the tracer is off."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if torch._C._get_tracing_state() is None or not torch._C._dispatch_tls_is_dispatch_key_excluded(_TRACER):
            return call(*args, **kwargs)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
        try:
            return call(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, True)

    return called


def unheard(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function that calls an overload past every `__torch_function__`, of modes and of its arguments' classes. (Those
    called inside the operator still apply.)"""
    if not takes_numbers(func):
        return functools.partial(torch._C._dispatch_call_boxed, func._handle)
    call = func._op

    def call_with_numbers(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            result = call(*args, **kwargs)
        return result

    return call_with_numbers


def devices_of(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    """The accelerators of a kind that an op works on."""
    found = {tensor.device for tensor in tensors_in((*args, *kwargs.values())) if tensor.device.type == kind}
    given = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if given is not None and given.type == kind:
        here = torch.accelerator.current_device_index() if given.index is None else given.index
        found.add(torch.device(given.type, here))
    return found


class Attached(NamedTuple):
    """Something that is kept with a kernel: see `format.model.Attachment`."""

    role: str
    name: str
    content: bytes


class CodeKernel(CapturedKernel):
    """Such a kernel. Its calls give all arguments by name, in the order of the schema."""

    __slots__ = ("_attached", "_kind", "_overload", "_schema_text", "_unread")

    def __init__(
        self,
        kind: KernelKind,
        schema: str,
        call: Callable[..., Any],
        attached: Iterable[Attached] = (),
        unread: Iterable[str] = (),
    ) -> None:
        """`call` runs it. `unread`: the arguments of which it reads nothing. Raises Unrepresentable if `schema` is
        none."""
        try:
            parsed = parse_schema(schema)
        except (RuntimeError, ValueError) as error:
            raise Unrepresentable("opaque_argument", f"no schema can be written for it ({first_line(error)})") from None
        self._kind, self._attached, self._unread = kind, tuple(attached), frozenset(unread)
        self._schema_text, self._overload = printed_schema(parsed), str(parsed.overload_name or "default")
        self.func: Any = None
        self.call = call
        self.id = 0
        self.name = parsed.name
        self.namespace = parsed.name.partition("::")[0]
        # Not PyTorch's own: addresses in what it is given do not pass unnoticed.
        self.own = False
        self.operator = replace(operators.operator_named(self.name), casts_inside=False)
        self.unnameable = ""
        self.state_argument = None
        self.arguments = tuple(
            Argument(each.name, each.alias_info is not None and each.alias_info.is_write, each.kwarg_only)
            for each in parsed.arguments
        )
        self.indices = {each.name: index for index, each in enumerate(self.arguments)}
        self.writes = tuple(index for index, each in enumerate(self.arguments) if each.written)
        self.results = len(parsed.returns)
        self.action = Action.record
        self.only_with = self.body = self.parts = None
        self.mixed_lists = self.view = self.in_place_view = self.reads_nothing = self.elementwise = False
        self.random = False
        self.dropout = -1
        self.tensor_places = self.accumulates_at = self.opaque_results = self.own_kernels = ()

    @property
    def overload(self) -> str:
        return self._overload

    @property
    def schema(self) -> str:
        return self._schema_text

    def reads(self, index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Whether a call reads bytes of the tensors in its argument `index`."""
        return self.arguments[index].name not in self._unread

    def definition(self, writer: CaptureWriter) -> Kernel:
        """The kernel's definition in a capture, its attachments written."""
        return Kernel(self.name, self.overload, self.schema, self._kind, writer.attach(self._attached))
