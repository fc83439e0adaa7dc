"""Which allocation a traced tensor is on, and what the trace knows of its content.

An execution trace identifies memory by its address, and an allocator reuses addresses: memory that an operator returns
without having it as an argument is a new allocation, even if the address was used before. Memory that an operator uses
and that no earlier one returned existed when the trace began.

Content exists only if the traced program requested it: the ranges of integer tensors
(ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE), and the files of tensors that were saved completely
(..._DATA). Other storages that no call produced have no content in the trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import ITEM_BYTES, DType, StorageOrigin, TensorFlag
from replayfmt.format.model import Recipe, Statistics
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE

from ..common.arguments import dtype_of
from ..common.inductor_cache import InductorCache, NoKernel
from ..common.synthesis import TracedStorage, contiguous
from ..common.trace_files import archive_texts
from .nodes import TracedTensor

Address = tuple[str, int]
_NO_FLAGS = TensorFlag(0)
# The dtypes that Python numbers get if an operator takes tensors.
NUMBERS = frozenset({DType.float64, DType.int64, DType.complex128, DType.bool})


class PlacedTensor(NamedTuple):
    """A tensor, its strides, and the number of its allocation, from 1. `flags` say whether it is a conjugated or
    negated view; `doubtful`: this memory has such views, and the trace does not say whether this tensor is one.
    `strides_known`: the strides are from the trace, or of an operator's result."""

    tensor: TracedTensor
    strides: tuple[int, ...]
    allocation: int
    flags: TensorFlag = _NO_FLAGS
    doubtful: bool = False
    strides_known: bool = True


@dataclass
class _Live:
    """The allocation that is currently at an address. `exact`: an operator made it, exactly as long as its result;
    `returned`: an operator returned it, or wrote to it; `blank`: it has not been written since it was allocated.
    `tensors`: the latest one by id; `alike`: the latest strides by sizes and offset. `flags` are those of tensors by
    id, `flagged` says whether any tensor ever had one."""

    number: int
    exact: bool
    end: int
    tensors: dict[int, PlacedTensor] = field(default_factory=dict)
    alike: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)
    returned: bool = False
    blank: bool = False
    flags: dict[int, TensorFlag] = field(default_factory=dict)
    flagged: bool = False


class Allocations:
    """All allocations of a trace, by number, from 1: the minimum of `bytes` needed, whether an operator `made` it, and
    the step that used it `last`."""

    def __init__(self) -> None:
        self.bytes, self.made, self.last = array("q", [0]), array("b", [0]), array("q", [0])
        self.devices: list[str] = [""]

    def new(self, device: str, made: bool) -> int:
        self.bytes.append(0)
        self.made.append(made)
        self.last.append(0)
        self.devices.append(device)
        return len(self.made) - 1


class MemoryMap:
    """Follows addresses through a trace. `replaced` names the tensors of the last step that were assumed to be on other
    memory, whose allocation the trace does not show. `unseen` are the allocations to which something outside the trace
    wrote."""

    def __init__(self) -> None:
        self.allocations = Allocations()
        self._live: dict[Address, _Live] = {}
        self._empty: dict[Address, _Live] = {}
        self.replaced: list[TracedTensor] = []
        self.unseen: set[int] = set()
        self.steps = 0

    def access(self, read: Iterable[TracedTensor], written: Iterable[TracedTensor]) -> None:
        """Note what an operator is about to read and write. Memory that was allocated and is read before any
        operator wrote to it was filled unseen (as `torch.tensor` does): from here on it is an allocation that no
        operator made."""
        for tensor in read:
            live = self._live.get(_address(tensor))
            if live is not None and live.blank:
                new = self._live[_address(tensor)] = self._new(tensor.device, made=False)
                new.tensors, new.alike, new.types, new.returned = live.tensors, live.alike, live.types, True
                new.flags, new.flagged = live.flags, live.flagged
                self.unseen.add(new.number)
        for tensor in written:
            live = self._live.get(_address(tensor))
            if live is not None:
                live.blank = False

    def take(self, inputs: Iterable[TracedTensor]) -> list[PlacedTensor]:
        self.replaced = []
        self.steps += 1
        return [self._given(tensor) for tensor in inputs]

    def give(
        self,
        outputs: Sequence[tuple[TracedTensor, tuple[int, ...] | None]],
        given: Sequence[PlacedTensor],
        *,
        known: bool = True,
        blank: bool = False,
        turned: TensorFlag = _NO_FLAGS,
    ) -> list[PlacedTensor]:
        """Place the results of an operator, each with its strides (None: those of the trace, or contiguous).

        `known` is False for operators that return existing memory that was not an argument (`set_` of a storage),
        `blank` True for those that leave new memory unwritten. Views have the flags of their base, toggled by `turned`
        for `_conj` and `_neg_view`.
        """
        addresses = [_address(each.tensor) for each in given]
        old = {address for address, each in zip(addresses, given, strict=True) if each.tensor.elements}
        flags: dict[Any, TensorFlag] = {}  # by address, and by that and an id
        if any([each.flags is not _NO_FLAGS for each in given]):
            flags |= {address: each.flags for address, each in zip(addresses[::-1], given[::-1], strict=True)}
            flags |= {(address, each.tensor.id): each.flags for address, each in zip(addresses, given, strict=True)}
        fresh: dict[Address, _Live] = {}
        placed = []
        for tensor, strides in outputs:
            address = _address(tensor)
            steps = tensor.strides if strides is None else strides
            computed = steps is not None and len(steps) == len(tensor.sizes)
            steps = steps if steps is not None and computed else contiguous(tensor.sizes)
            if not tensor.elements:
                live = self._returned_empty(tensor, address in addresses)
            elif address in fresh:
                live = fresh[address]
            elif address in self._live and (address in old or not known):
                live = self._live[address]
            else:
                live = fresh[address] = self._live[address] = self._new(tensor.device, made=known)
                live.blank = blank
                self._empty.pop(address, None)
            live.returned = True
            viewed = flags.get((address, tensor.id), flags.get(address, _NO_FLAGS)) if flags else _NO_FLAGS
            live.flags[tensor.id] = _NO_FLAGS if address in fresh else viewed ^ turned if turned else viewed
            placed.append(self._note(live, tensor, steps, known=computed))
        return placed

    def forget(self, tensors: Iterable[TracedTensor]) -> None:
        """These tensors come from something that cannot be replayed: earlier records do not explain their memory's
        content."""
        for tensor in tensors:
            self._live.pop(_address(tensor), None)
            self._empty.pop(_address(tensor), None)

    def _given(self, tensor: TracedTensor) -> PlacedTensor:
        address = _address(tensor)
        live = self._live.get(address)
        if live is None and not tensor.elements:
            live = self._empty.get(address)
        strides, computed = self._strides(tensor, live)
        if (
            live is not None
            and like_number(tensor)
            and not (live.returned and tensor.id in live.tensors and tensor.type_name in live.types)
        ):
            live = None
        if live is not None and live.exact and (tensor.end(strides) > live.end or tensor.type_name not in live.types):
            # A tensor's id is an address too: having seen it on this memory before proves nothing.
            self.replaced.append(tensor)
            live = None
        if live is None:
            live = self._new(tensor.device, made=False)
            (self._live if tensor.elements else self._empty)[address] = live
        return self._note(live, tensor, strides, known=computed)

    def _strides(self, tensor: TracedTensor, live: _Live | None) -> tuple[tuple[int, ...], bool]:
        """Strides, and whether they are known. A tensor that is new on its memory (autograd keeps different ones from
        those that it was passed) is assumed to have the strides of the last one with its sizes."""
        if tensor.strides is not None:
            return tensor.strides, True
        seen = live.tensors.get(tensor.id) if live is not None else None
        if seen is not None and seen.tensor.sizes == tensor.sizes:
            return seen.strides, seen.strides_known
        last = live.alike.get((tensor.sizes, tensor.offset)) if live is not None else None
        return (contiguous(tensor.sizes) if last is None else last), False

    def _returned_empty(self, tensor: TracedTensor, alias: bool) -> _Live:
        address = _address(tensor)
        if alias and address in self._live:
            return self._live[address]
        if alias and address in self._empty:
            return self._empty[address]
        live = self._empty[address] = self._new(tensor.device, made=True)
        return live

    def _new(self, device: str, *, made: bool) -> _Live:
        return _Live(self.allocations.new(device, made), made, 0)

    def _note(self, live: _Live, tensor: TracedTensor, strides: tuple[int, ...], *, known: bool) -> PlacedTensor:
        flags = live.flags.get(tensor.id, _NO_FLAGS)
        live.alike[tensor.sizes, tensor.offset] = strides
        self.allocations.last[live.number] = self.steps
        seen = live.tensors.get(tensor.id)
        if seen is not None and seen[0] is tensor and seen[1:] == (strides, live.number, flags, live.flagged, known):
            return seen
        end = tensor.end(strides)
        live.end = max(live.end, end)
        live.types.add(tensor.type_name)
        live.flagged |= bool(flags)
        self.allocations.bytes[live.number] = max(self.allocations.bytes[live.number], end)
        placed = live.tensors[tensor.id] = PlacedTensor(tensor, strides, live.number, flags, live.flagged, known)
        return placed


def _address(tensor: TracedTensor) -> Address:
    return tensor.device, tensor.storage


def like_number(tensor: TracedTensor) -> bool:
    """Whether this may be a Python number passed as a tensor: each is a short allocation of its own, often at the
    address of the previous one."""
    return tensor.device == "cpu" and not tensor.sizes and dtype_of(tensor.type_name) in NUMBERS


_INTEGERS = frozenset(
    {DType.uint8, DType.int8, DType.int16, DType.int32, DType.int64, DType.uint16, DType.uint32, DType.uint64}
)
_UNSIGNED = frozenset({DType.uint8, DType.uint16, DType.uint32, DType.uint64})
_LARGEST_CONSTANT = 64 << 20
_RESOURCES = "_resources"


# The neutral element of arithmetic with a number: by operator, without a trailing underscore.
_NEUTRAL = {"aten::add": 0, "aten::sub": 0, "aten::mul": 1, "aten::div": 1, "aten::pow": 1}


@cache
def _element(number: int, dtype: DType) -> bytes:
    return bytes(torch.tensor(number, dtype=TORCH_DTYPE[dtype]).reshape(1).view(torch.uint8).tolist())


def _folder_name(name: str) -> str:
    """The name of the folder that the observer puts a trace's resources into."""
    return name.removesuffix(".gz").removesuffix(".json") + _RESOURCES


@dataclass(frozen=True)
class FoundContent:
    """Content for a storage; `told` describes its source, for the note on the call that uses it."""

    origin: StorageOrigin
    content: bytes | Recipe
    told: str


class TracedContent:
    """The resources of one trace: Triton sources by file name, saved tensors by node and number. `problems` are
    sentences about resources that could not be read."""

    def __init__(self, path: str, member: str = "", inductor: InductorCache | None = None) -> None:
        """`member` is the trace's file in an archive, `inductor` has further sources."""
        self._path, self._member, self._inductor = path, member, inductor
        self.problems: list[str] = []

    @cached_property
    def _files(self) -> dict[str, bytes]:
        def wanted(name: str) -> bool:
            return _RESOURCES in name and (name.endswith(".py") or name.endswith(".dat"))

        members, damage = archive_texts(self._path, wanted)
        if damage:
            self.problems.append(f"resources of the trace may be missing: {damage}")
        own = str(Path(self._member).parent / _folder_name(Path(self._member).name)) + "/"
        if any(name.startswith(own) for name in members):  # else the archive has one trace, under any name
            members = {name: data for name, data in members.items() if name.startswith(own)}
        found = {Path(name).name: data for name, data in members.items()}
        folder = self._folder()
        if folder is not None:
            for each in sorted(folder.iterdir()):
                if each.suffix in (".py", ".dat") and each.is_file():
                    found.setdefault(each.name, each.read_bytes())
        return found

    def _folder(self) -> Path | None:
        """The folder in which the observer puts resources: `x_resources` beside `x.json`."""
        path = Path(self._path)
        folder = path.with_name(_folder_name(path.name))
        return folder if folder.is_dir() else None

    def source(self, name: str) -> str:
        """A Triton kernel's source, by its file's name. Raises NoKernel if it is nowhere."""
        data = self._files.get(name)
        if data is not None:
            return data.decode(errors="replace")
        if self._inductor is None:
            raise NoKernel("it is not beside the trace")
        return self._inductor.text("", name)

    def number(self, operator: str, dtype: DType, storage: TracedStorage) -> FoundContent | None:
        """A value for a Python number, which no trace records: the operator's neutral element, if it has one."""
        neutral = _NEUTRAL.get(operator.removesuffix("_"))
        if neutral is None or dtype not in TORCH_DTYPE or storage.bytes < ITEM_BYTES[dtype]:
            return None
        element = _element(neutral, dtype)
        return FoundContent(
            StorageOrigin.payload,
            element.ljust(storage.bytes, b"\0"),
            f"a Python number whose value is not in the trace; taken as {neutral}, which changes nothing",
        )

    def find(
        self,
        node: int,
        number: int,
        placed: PlacedTensor,
        dtype: DType,
        storage: TracedStorage,
        span: tuple[int, int] | None,
    ) -> FoundContent | None:
        """The content of a storage that this tensor is the first to use, as far as the trace has it."""
        tensor = placed.tensor
        whole = (
            dtype in _INTEGERS
            and not tensor.offset
            and placed.strides == contiguous(tensor.sizes)
            and tensor.elements * ITEM_BYTES[dtype] == storage.bytes
        )
        if not whole or not storage.bytes:
            return None
        saved = self._files.get(f"nid_{node}_tid_{number}.dat")
        if saved is not None and len(saved) == storage.bytes:
            return FoundContent(StorageOrigin.payload, saved, "its content is saved with the trace")
        if span is None:
            return None
        low, high = span
        if low == high and storage.bytes <= _LARGEST_CONSTANT:
            element = low.to_bytes(ITEM_BYTES[dtype], "little", signed=dtype not in _UNSIGNED)
            return FoundContent(StorageOrigin.payload, element * tensor.elements, f"all of its elements are {low}")
        spread = (high - low) / 12**0.5
        statistics = Statistics((low + high) / 2, spread, float(low), float(high), 0, 0, 0, 0)
        recipe = Recipe(dtype, tensor.elements, node * 1009 + number, statistics)
        return FoundContent(
            StorageOrigin.initializer,
            recipe,
            f"its elements lie between {low} and {high} in the trace; drawn evenly from there",
        )
