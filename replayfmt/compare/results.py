"""What a comparison finds: its two captures, the alignment, where results part, and how far they are apart there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replayfmt.errors import OpReplayError
from replayfmt.format.codes import DType
from replayfmt.format.model import TensorDigest, TensorValue

from .alignment import Alignment
from .distances import Distance, digest_distance, distance
from .divergence import Divergence, Root
from .structure import StructureDifference
from .times import Times
from .tolerances import Tolerance
from .trace import Side

_SCALAR = 1 << 30


class NotComparable(OpReplayError):
    """The captures have nothing in common."""


@dataclass(frozen=True)
class Growth:
    """How far results are apart at one place behind a root: the largest relative distance there, None if unknown."""

    scope: str
    ordinal: int
    kernel: str
    results: int
    relative: float | None


@dataclass
class Named:
    """A root with what people need: `alike` is how many others are of the same kind and kernel."""

    root: Root
    kind: str
    ordinals: tuple[tuple[int, ...], tuple[int, ...]]
    kernels: tuple[tuple[str, ...], tuple[str, ...]]
    calls: tuple[str, str]
    scope: str
    changed: list[tuple[str, str, str]]
    distance: Distance | None
    consequences: int
    growth: list[Growth]
    alike: int = 0
    note: str = ""


@dataclass
class Comparison:
    """`outcome`: `equal` (every result that can be compared was, and none differs by more than the tolerance),
    `different`, or `structure` (nothing was there to compare, so only structure was). `ok` is True for `equal`. `text`
    is what opreplay-compare prints, `rows` are those of its --format=jsonl. Prints as the text."""

    a: Side
    b: Side
    tolerance: Tolerance
    structure: list[StructureDifference]
    alignment: Alignment
    divergence: Divergence
    roots: list[Named] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    times: Times | None = None
    text: str = ""
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def outcome(self) -> str:
        found = self.divergence
        if found.different or found.roots or found.alone:
            return "different"
        return "equal" if found.compared and not self.alignment.doubts else "structure"

    @property
    def ok(self) -> bool:
        return self.outcome == "equal"

    @property
    def first(self) -> Named | None:
        """The first divergence: None if nothing differs, or none can be named."""
        return next((each for each in self.roots if not each.root.doubtful), None)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def observed_distance(a: Side, b: Side, one: int, other: int, rule: Tolerance) -> Distance:
    """The distance of two observations: of digests, or of scalars."""
    op, its = int(a.trace.observed_op[one]), int(b.trace.observed_op[other])
    kernel = a.kernel(op) if op >= 0 else ""
    if int(a.trace.observed_as[one]) == _SCALAR:
        values = [_numbers(side.record(place).results) for side, place in ((a, op), (b, its))]
        if len(values[0]) != len(values[1]) or not len(values[0]):
            return Distance(len(values[0]), 0, 1, 1, note=f"{values[0].tolist()} against {values[1].tolist()}")
        dtype = next((each.meta.dtype for each in _tensors(a.record(op).args)), DType.float64)
        return distance(values[0], values[1], dtype, rule.of(kernel, dtype))
    digests = digest_of(a, one), digest_of(b, other)
    if digests[0] is None or digests[1] is None:
        return Distance(0, 0, 1, 1, note="the captures only say that the results differ")
    dtype = dtype_of(a, one)
    return digest_distance(digests[0], digests[1], dtype, rule.of(kernel, dtype))


def _numbers(values: tuple[Any, ...]) -> np.ndarray:
    return np.array([float(each) for each in values if isinstance(each, int | float)], np.float64)


def digest_of(side: Side, place: int) -> TensorDigest | None:
    """The digest of an observation."""
    if side.replayed is not None:
        return side.replayed.get(place)
    return TensorDigest.from_record(side.reader.record(int(side.trace.observed_at[place])))


def dtype_of(side: Side, place: int) -> DType:
    """The dtype of what was observed."""
    record = side.reader.record(int(side.trace.observed_at[place]))
    if record.signature.kernel:  # made by a replay: of the op itself
        tensors = [each for each in _tensors((*record.results, *record.args))]
        shapes = int(side.trace.observed_as[place])
        return tensors[min(shapes, len(tensors) - 1)].meta.dtype if tensors else DType.none
    tensor = record.argument("tensor")
    return tensor.meta.dtype if isinstance(tensor, TensorValue) else DType.none


def _tensors(values: Any) -> list[TensorValue]:
    found: list[TensorValue] = []
    for value in values:
        if isinstance(value, TensorValue):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
