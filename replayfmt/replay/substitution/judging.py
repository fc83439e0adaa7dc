"""Judges one call of a replacement by what the original did with the same arguments.

Values are compared within tolerances; structure and memory must be the same. `MemoryLabels` finds storages by the
address ranges they occupy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from replayfmt.pytorch.tensors.memory import byte_tensor

from ..run.content import Clones, copy_of, has_memory, same_bytes, strided_parts
from ..verification import telling_strides
from .distance import Distance, Tolerance, WorstElement, distance, worst_element

_MOST_KEPT = 16
_MOST_KEPT_BYTES = 256 << 20


class MemoryLabels:
    """Labelled storages, found by any storage that shares bytes with them."""

    def __init__(self, known: Iterable[tuple[torch.UntypedStorage, str]] = ()) -> None:
        self._by_identity: dict[int, tuple[torch.UntypedStorage, str]] = {}
        self._sorted: dict[torch.device, list[tuple[int, int, str]]] = {}
        self._longest = 0
        for storage, label in known:
            self.add(storage, label)

    def add(self, storage: torch.UntypedStorage, label: str) -> None:
        self._by_identity[storage._cdata] = storage, label
        if storage.nbytes():
            first = storage.data_ptr()
            insort(self._sorted.setdefault(storage.device, []), (first, first + storage.nbytes(), label))
            self._longest = max(self._longest, storage.nbytes())

    def find(self, storage: torch.UntypedStorage) -> str | None:
        """The label of the registered storage that shares memory with this one; None if there is none."""
        known = self._by_identity.get(storage._cdata)
        if known is not None:
            return known[1]
        places = self._sorted.get(storage.device)
        if not places or not storage.nbytes():
            return None
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for index in range(bisect_left(places, (end,)) - 1, -1, -1):
            start, stop, label = places[index]
            if first < stop:
                return label
            if start + self._longest <= first:  # no earlier one reaches that far either
                break
        return None


class Returned:
    """What replacements returned in one pass, to detect a second call that returns the same memory.

    A storage is marked, and recognized for as long as it lives. Other storages on its memory are recognized by the
    memory of the last calls, which is kept alive for this.
    """

    def __init__(self) -> None:
        self._pass = object()
        self._kept: deque[tuple[MemoryLabels, int]] = deque()
        self._bytes = 0

    def again(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether an earlier call returned any of these storages, all returned by one call; remembers them."""
        found = any(
            getattr(each, "_opreplay_returned", None) is self._pass
            or any(ranges.find(each) is not None for ranges, _size in self._kept)
            for each in storages
        )
        for each in storages:
            each._opreplay_returned = self._pass  # type: ignore[attr-defined]
        size = sum(each.nbytes() for each in storages)
        self._kept.append((MemoryLabels((each, "") for each in storages), size))
        self._bytes += size
        while len(self._kept) > _MOST_KEPT or (self._bytes > _MOST_KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= self._kept.popleft()[1]
        return found


# Numbers returned to the host are judged like a digest's statistics (replay/verification.py).
_NUMBERS = (bool, int, float, complex)
_NUMBER_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ComparedTensor:
    """The values of one result or argument: `where` it is, how far apart the values are, which tolerance was used
    (`close`), and the element farthest off if one is too far off."""

    where: str
    distance: Distance
    close: str
    worst: WorstElement | None


def compare(where: str, expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> ComparedTensor:
    """Compare two strided tensors of the same dtype and sizes."""
    found = distance(expected, got, tolerance)
    return ComparedTensor(
        where,
        found,
        tolerance.describe(expected.dtype),
        worst_element(expected, got, tolerance) if found.beyond else None,
    )


@dataclass
class Judgement:
    """The findings on one call: `faults` are sentences about its behaviour, `compared` has results and arguments."""

    faults: list[str] = field(default_factory=list)
    compared: list[ComparedTensor] = field(default_factory=list)

    @property
    def distance(self) -> Distance:
        total = Distance()
        for each in self.compared:
            total = total.with_(each.distance)
        return total


@dataclass(frozen=True)
class CallOutcomes:
    """The same call on both sides: the arguments by name as each kernel left them, and what it returned."""

    original: Mapping[str, Any]
    replacement: Mapping[str, Any]
    returned: Any
    replaced: Any


def judge(
    sides: CallOutcomes,
    results: int,
    clones: Clones,
    pristine: Mapping[int, torch.UntypedStorage],
    written: Sequence[str],
    fills: bool,
    tolerance: Tolerance,
) -> Judgement:
    """Compare both sides of a call of an operator that has so many results.

    `written` names the arguments that the operator may write by its schema. `pristine` has copies of the arguments'
    storages for operators whose schemas do not declare writes: they show what the original wrote. Without `fills` the
    values of results mean nothing (memory that was never written).
    """
    judge = _Judge(sides, _Labels(clones), fills, tolerance)
    judge.results(results)
    judge.arguments(clones, pristine, written)
    return judge.judgement


class _Judge:
    def __init__(self, sides: CallOutcomes, labels: _Labels, fills: bool, tolerance: Tolerance) -> None:
        self._sides, self._labels, self._fills, self._tolerance = sides, labels, fills, tolerance
        self.judgement = Judgement()
        self._fault = self.judgement.faults.append

    def results(self, count: int) -> None:
        sides = self._sides
        mine, theirs = _as_results(sides.returned, count), _as_results(sides.replaced, count)
        if len(mine) != len(theirs):
            self._fault(f"returns {_counted(sides.replaced)}, the original {_counted(sides.returned)}")
            return
        for index, (expected, got) in enumerate(zip(mine, theirs, strict=True)):
            place = f"result {index}"
            left, right = list(strided_parts(expected, place)), list(strided_parts(got, place))
            if [where for where, _value in left] != [where for where, _value in right]:
                self._fault(f"{place} is {described(got)}, the original's {described(expected)}")
                continue
            for (where, one), (_where, other) in zip(left, right, strict=True):
                if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                    self._tensor(where, one, other)
                else:
                    self._number(where, one, other)

    def _tensor(self, where: str, expected: torch.Tensor, got: torch.Tensor) -> None:
        mine, theirs = self._labels.of(expected, "original"), self._labels.of(got, "replacement")
        if _metadata(expected) != _metadata(got):
            self._fault(f"{where} is {described(got)}, the original's {described(expected)}")
        elif mine != theirs:
            self._fault(f"{where} is on {theirs}, the original's on {mine}")
        elif has_memory(expected):
            length, given = (each.untyped_storage().nbytes() for each in (expected, got))
            if given < length:
                self._fault(f"{where} is on a storage of {given} bytes, the original's on one of {length}")
            elif self._fills:
                self.judgement.compared.append(compare(where, expected, got, self._tolerance))

    def _number(self, where: str, expected: Any, got: Any) -> None:
        if type(expected) is not type(got):
            self._fault(f"{where} is {described(got)}, the original's {described(expected)}")
        elif isinstance(expected, float | complex):
            of = torch.complex128 if isinstance(expected, complex) else torch.float64
            mine, theirs = torch.tensor([expected], dtype=of), torch.tensor([got], dtype=of)
            found = compare(where, mine, theirs, Tolerance(_NUMBER_TOLERANCE))
            worst = None if found.worst is None else replace(found.worst, index=None)
            close = f"{_NUMBER_TOLERANCE:g} of the value"
            self.judgement.compared.append(replace(found, close=close, worst=worst))
        elif expected != got:
            self._fault(f"{where} is {got!r}, the original's {expected!r}")

    def arguments(self, clones: Clones, pristine: Mapping[int, torch.UntypedStorage], written: Sequence[str]) -> None:
        pairs = list(_pairs(self._sides))
        for name, expected, got in pairs:
            if _metadata(expected) != _metadata(got):
                self._fault(f"leaves argument {name} as {described(got)}, the original as {described(expected)}")
                return
        for address, original in clones.originals.items():
            copy = clones.copies[address]
            here = [
                (name, expected, got)
                for name, expected, got in pairs
                if has_memory(expected) and expected.untyped_storage()._cdata == address
            ]
            named = ", ".join(dict.fromkeys(name for name, _expected, _got in here)) or "a storage"
            if original.nbytes() != copy.nbytes():
                self._fault(
                    f"leaves the memory of argument {named} with {copy.nbytes()} bytes, the original with "
                    f"{original.nbytes()}"
                )
                continue
            judged = [each for each in here if _top(each[0]) in written]
            if not judged and address in pristine and not same_bytes(original, pristine[address]):
                judged = here  # the original wrote it although its schema does not say so
            same = same_bytes(original, copy)
            if not judged:
                if not same:
                    self._fault(f"writes argument {named}, which the original does not write")
                continue
            if self._fills:
                self.judgement.compared += [
                    compare(f"argument {name}", expected, got, self._tolerance) for name, expected, got in judged
                ]
            if not same and not _equal_outside(original, copy, judged):
                names = ", ".join(name for name, *_ in judged)
                self._fault(f"writes memory beside argument {names}, which the original leaves as it is")


class _Labels:
    """Labels the memory that a tensor is on, the same way on both sides: an argument's, or new memory in order of
    appearance."""

    def __init__(self, clones: Clones) -> None:
        self._labelled = {
            side: MemoryLabels((storage, f"argument memory {index}") for index, storage in enumerate(storages))
            for side, storages in (("original", clones.originals.values()), ("replacement", clones.copies.values()))
        }
        self._new = {"original": 0, "replacement": 0}

    def of(self, tensor: torch.Tensor, side: str) -> str:
        """The label of a tensor's memory. The original's inputs count as foreign on the replacement's side."""
        if not has_memory(tensor):
            return "no memory"
        storage = tensor.untyped_storage()
        label = self._labelled[side].find(storage)
        if label is None:
            self._new[side] += 1
            label = f"new memory {self._new[side]}"
            self._labelled[side].add(storage, label)
        return label


def _as_results(returned: Any, count: int) -> list[Any]:
    """A return value as the results of an operator with `count` results. A single result may itself be a list."""
    if count == 1:
        return [returned]
    if returned is None:
        return []
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def _counted(returned: Any) -> str:
    if returned is None:
        return "nothing"
    return f"{len(returned)} results" if isinstance(returned, tuple | list) else described(returned)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that later work relies on."""
    sizes = tuple(tensor.shape)
    return (
        tensor.dtype,
        sizes,
        telling_strides(sizes, tensor.stride()),
        int(tensor.storage_offset()),
        tensor.device,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor._is_zerotensor(),
        tensor.requires_grad,
    )


def described(value: Any) -> str:
    """A value as text for people."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        text = f"{name}{list(value.shape)}"
        if value.layout is not torch.strided:
            return f"{text} of layout {str(value.layout).removeprefix('torch.')}"
        offset = int(value.storage_offset())
        flags = "".join(
            f", {flag}"
            for flag, is_set in (
                ("conj", value.is_conj()),
                ("neg", value.is_neg()),
                ("requires grad", value.requires_grad),
            )
            if is_set
        )
        return (
            f"{text} with strides {list(value.stride())}"
            + (f" at offset {offset}" if offset else "")
            + f" on {value.device}{flags}"
        )
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, type):
        return f"a {value.__name__}"
    if value is None or isinstance(value, (*_NUMBERS, str)):
        return repr(value)
    return f"a {type(value).__name__}"


def _pairs(sides: CallOutcomes) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Every strided tensor among the arguments, on both sides."""
    for name, value in sides.original.items():
        left, right = strided_parts(value, name), strided_parts(sides.replacement[name], name)
        for (where, expected), (_where, got) in zip(left, right, strict=False):
            if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
                yield where, expected, got


def _top(where: str) -> str:
    """The argument that contains a place: `tensors[3]` → `tensors`."""
    return where.partition("[")[0].partition(",")[0]


def _equal_outside(
    original: torch.UntypedStorage, copy: torch.UntypedStorage, judged: Sequence[tuple[str, torch.Tensor, torch.Tensor]]
) -> bool:
    """Whether two storages are equal outside of these tensors, which are the same views on both."""
    mask = copy_of(original)
    byte_tensor(mask).zero_()
    for _name, expected, _got in judged:
        width = expected.element_size()
        sizes, strides = (*expected.shape, width), (*(stride * width for stride in expected.stride()), 1)
        view = torch.empty((0,), dtype=torch.uint8, device=mask.device)
        view.set_(mask, int(expected.storage_offset()) * width, sizes, strides)
        view.fill_(1)
    outside = byte_tensor(mask) == 0
    return bool(torch.equal(byte_tensor(original)[outside], byte_tensor(copy)[outside]))
