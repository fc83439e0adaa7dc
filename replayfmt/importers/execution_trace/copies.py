"""Copies in an execution trace that belong to autograd, not to the operator that they are children of."""

from __future__ import annotations

from collections import defaultdict

from .nodes import TracedTensor, TraceNode, operator_name


class KeptCopies:
    """Copies that autograd makes of a tensor before an in-place operator changes it, for use in the backward pass.

    They are children of the operator but not part of its work. A copy that is not used outside the operator is the
    operator's own.
    """

    def __init__(self) -> None:
        self._under: dict[int, list[tuple[int, TracedTensor, TracedTensor]]] = {}
        self._waiting: dict[tuple[str, int], tuple[int, int, TracedTensor]] = {}
        self._kept: dict[int, list[int]] = defaultdict(list)

    def add(self, position: int, node: TraceNode) -> None:
        """Add the next node of the trace: children come before their parent."""
        given = [tensor for _position, tensor in node.inputs.tensors]
        if self._waiting:
            taken = {(each.device, each.storage) for each in given}
            for each in given:
                found = self._waiting.get((each.device, each.storage))
                if found is not None and (found[2].sizes, found[2].type_name) == (each.sizes, each.type_name):
                    del self._waiting[each.device, each.storage]
                    self._kept[found[0]].append(found[1])
            for _position, tensor in node.outputs.tensors:
                if (tensor.device, tensor.storage) not in taken:
                    self._waiting.pop((tensor.device, tensor.storage), None)  # by now another allocation
        returned = [tensor for _position, tensor in node.outputs.tensors]
        if node.name == "aten::clone" and given and returned:
            self._under.setdefault(node.parent, []).append((position, given[0], returned[0]))
        copies = self._under.pop(node.id, None)
        if copies and given and operator_name(node.schema)[0].endswith("_"):
            for copy, source, made in copies:
                if (source.storage, source.sizes) == (given[0].storage, given[0].sizes):
                    self._waiting[made.device, made.storage] = node.id, copy, made

    def of(self, operator: int) -> list[int]:
        """The positions of the copies that belong before an operator, by its id."""
        return self._kept.get(operator, [])
