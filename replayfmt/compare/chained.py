"""How far rounding moves what leaves a block of ops: the block runs in float64 and on perturbed inputs, each op on what
those before it made.

As for a single op (`replayfmt.pytorch.rounding`), but only what enters the block is changed; what happens to that in
between is what the ops make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from replayfmt.pytorch.rounding import PERTURBED, changed, perturbed, spread_of, widened
from replayfmt.pytorch.tensors.memory import tensors_in, undispatched

from .trace import Trace

Memory = torch.Tensor  # all elements of a storage, in one dimension


class Chain:
    """Runs the ops of blocks, which come in order. `errors` is how far each value that they write may be off; it lacks
    those of which nothing is known. What no later op reads is dropped."""

    def __init__(self, trace: Trace, ops: Collection[int]) -> None:
        self.errors: dict[int, float] = {}
        self._trace, self._ops = trace, frozenset(ops)
        self._last_use = {value: op for op in sorted(ops) for value in self._reads(op)}
        self._runs: dict[int, list[Memory]] = {}  # by value: as it was, in float64, and perturbed
        self._generator = torch.Generator().manual_seed(0)

    def _reads(self, op: int) -> list[int]:
        trace = self._trace
        found: list[int] = trace.read_by(op).tolist()
        return found

    def run(
        self, op: int, overload: OpOverload, arguments: Sequence[Any], named: dict[str, Any], errors: Sequence[float]
    ) -> None:
        """The next op with its captured arguments. `errors` are known relative errors of the tensors, in order, NaN
        where only rounding is known; those of values from inside the block do not count."""
        trace, reads = self._trace, self._reads(op)
        written = trace.written_by(op).tolist()
        tensors = tensors_in([*arguments, *named.values()])
        if written and len(tensors) == len(reads) and all(map(self._enter, reads, tensors, errors)):
            with undispatched():
                runs = self._run(overload, tuple(arguments), named, reads, written)
            for value, memories in zip(written, runs, strict=False):
                self._runs[value] = memories
                spread = spread_of(memories[:1], [[each] for each in memories[1:]])
                if spread:
                    self.errors[value] = spread[0]
        for value in reads:
            if self._last_use[value] == op:
                self._runs.pop(value, None)

    def _enter(self, value: int, tensor: torch.Tensor, error: float) -> bool:
        """Whether the memory of a tensor that an op reads is known in all runs, from here on if it comes from outside
        the block."""
        if value not in self._runs:
            if int(self._trace.value_op[value]) in self._ops or tensor.layout is not torch.strided:
                return False
            memory = _memory(tensor)
            ways: list[Callable[[Memory], Memory]] = [torch.clone, widened]
            for number in range(PERTURBED):
                ways.append(partial(perturbed, error=error, generator=self._generator, one_sign=not number))
            self._runs[value] = [way(memory) for way in ways]
        return self._runs[value][0].dtype == tensor.dtype

    def _run(
        self,
        overload: OpOverload,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        reads: list[int],
        written: list[int],
    ) -> list[list[Memory]]:
        """The memory of each written value in all runs; nothing if the op fails in one."""
        storage = self._trace.value_storage
        at = {int(storage[value]): value for value in reads}
        in_place = {int(storage[value]) for value in written} & at.keys()
        found: list[list[Memory]] = [[] for _ in written]
        forms: list[torch.Tensor] = []  # of new results, as they were
        for number in range(2 + PERTURBED):
            memories = {
                key: self._runs[value][number].clone() if key in in_place else self._runs[value][number]
                for key, value in at.items()
            }
            values = iter(reads)

            def viewed(tensor: torch.Tensor, memories: Any = memories, values: Any = values) -> torch.Tensor:
                memory: Memory = memories[int(storage[next(values)])]
                return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

            taken, by_name = changed(arguments, named, viewed, widen=number == 1)
            try:
                returned = overload(*taken, **by_name)
            except Exception:
                return []
            known = {memory.untyped_storage()._cdata for memory in memories.values()}
            new = [each for each in tensors_in(returned) if each.untyped_storage()._cdata not in known]
            if any(each.layout is not torch.strided for each in new):
                return []
            new = list({each.untyped_storage()._cdata: each for each in reversed(new)}.values())[::-1]
            forms = forms or new
            fresh = iter(zip(forms, new, strict=True) if len(forms) == len(new) else ())
            for place, value in enumerate(written):
                key = int(storage[value])
                form, result = (None, memories[key]) if key in in_place else next(fresh, (None, None))
                if result is None or form is not None and form.shape != result.shape:
                    return []
                found[place].append(result if form is None else _laid_out(result, form))
        return found


def _memory(tensor: torch.Tensor) -> Memory:
    """All of a tensor's storage."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def _laid_out(result: torch.Tensor, form: torch.Tensor) -> Memory:
    """A result in memory that is laid out as that of another one."""
    memory = torch.zeros(len(_memory(form)), dtype=result.dtype, device=result.device)
    memory.as_strided(form.size(), form.stride(), form.storage_offset()).copy_(result)
    return memory
