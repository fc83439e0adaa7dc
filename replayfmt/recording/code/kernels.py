"""A kernel that is no operator: code of the program, with a schema that says what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch import operators
from replayfmt.pytorch.schemas import parse_schema, printed_schema

from ..dispatch.kernels import Action, Argument, CapturedKernel
from ..stream.records import Unrepresentable


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
            reason = str(error).strip().partition("\n")[0]
            raise Unrepresentable("opaque_argument", f"no schema can be written for it ({reason})") from None
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
