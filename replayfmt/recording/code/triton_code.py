"""A Triton kernel of a program: what launches of it read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from replayfmt.format.codes import KernelKind
from replayfmt.pytorch.tensors.looks import storage_of
from replayfmt.pytorch.triton.accesses import accesses_of
from replayfmt.pytorch.triton.kernels import KernelCode
from replayfmt.pytorch.triton.sources import StandaloneSource

from ..storages.trackers import GENERATED
from .kernels import Attached, CodeKernel


class TritonCode(CodeKernel):
    """A Triton kernel. Of a tensor that a launch does not read, such as a stand-in for one that it does without, no
    content is needed. The values of its constexprs decide what a launch reads. `generated`: Inductor wrote it, which
    has all of what it allocates written before it is read."""

    __slots__ = ("_code", "_constexprs", "_found", "_generated", "_reads_with", "_source", "assumed")

    def __init__(
        self, code: KernelCode, call: Callable[..., Any], source: StandaloneSource, *, generated: bool = False
    ) -> None:
        super().__init__(KernelKind.triton, code.schema, call, [Attached(*each) for each in code.attached])
        self._code, self._source, self._generated, form = code, source, generated, code.form
        self.assumed = tuple(sorted(self.indices[name] for name in code.assumed))
        forms = [(name, form.parameters[name]) for name in form.constexprs]
        self._constexprs = [(name, argument) for name, argument in forms if isinstance(argument, str)]
        self._reads_with: dict[str, frozenset[str] | None] = {}  # by the values of its constexprs
        self._found: dict[frozenset[str], TritonCode] = {}  # by what a launch changed

    def found_to_change(self, changed: Iterable[int]) -> TritonCode:
        names = frozenset(self.arguments[index].name for index in changed)
        if names not in self._found:
            code = self._code.found_to_change(names)
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
        read = self._code.read if self._code.read is not None else self._read_with(kwargs)
        return read is None or self._code.form.owner[argument.name] in read

    def _read_with(self, kwargs: dict[str, object]) -> frozenset[str] | None:
        constants = {name: kwargs[argument] for name, argument in self._constexprs}
        key = repr(constants)
        if key not in self._reads_with:
            self._reads_with[key] = accesses_of(self._source, constants).read
        return self._reads_with[key]
