"""A tensor's digest, which verification compares, and its form in a digest or host_read record.

The hash decides bitwise equality; the statistics and the sample distinguish close results from wrong ones, and measure
how far apart they are. Computing a digest needs PyTorch and lives in replayfmt.pytorch.tensors.digests.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..codes import ValueKind
from ..model import Node, Record, Value

SAMPLE_ELEMENTS = 64
_INT64_WRAP = 1 << 64
Sample = tuple[int | float | complex, ...]


def sample_positions(elements: int) -> list[int]:
    """Which logical elements (row-major) a digest samples: all up to 64, otherwise 64 evenly spaced, ends included."""
    if elements <= SAMPLE_ELEMENTS:
        return list(range(elements))
    return [index * (elements - 1) // (SAMPLE_ELEMENTS - 1) for index in range(SAMPLE_ELEMENTS)]


def signed(value: int) -> int:
    """An unsigned 64-bit number as the two's complement that an int slot holds."""
    return value - _INT64_WRAP if value >= 1 << 63 else value


@dataclass(frozen=True)
class TensorDigest:
    """Digest of one tensor's logical elements, in row-major order.

    `hash_low` and `hash_high` are the halves of the XXH3-128 of their bytes. Statistics are over the finite elements
    and None if there are none or the dtype has no order (bool, bits; complex has only `mean` and `l2`, of
    absolute values). `sample` holds the elements at `sample_positions`, unless the dtype has no such value (bits).
    """

    hash_low: int
    hash_high: int
    elements: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    l2: float | None
    sample: Sample

    @property
    def hex(self) -> str:
        """The hash as 32 hexadecimal digits, high half first."""
        return f"{self.hash_high:016x}{self.hash_low:016x}"

    def nodes(self) -> tuple[Node, ...]:
        """The signature nodes of this digest's fields."""
        kinds = {int: ValueKind.int, float: ValueKind.float, complex: ValueKind.complex}
        statistics = ((name, getattr(self, name)) for name in ("min", "max", "mean", "l2"))
        return (
            *(Node(ValueKind.int, name) for name in ("hash_low", "hash_high", "elements", "nan", "inf")),
            *(Node(ValueKind.none if value is None else ValueKind.float, name) for name, value in statistics),
            Node(ValueKind.list, "sample", None, tuple(Node(kinds[type(value)]) for value in self.sample)),
        )

    def slots(self) -> tuple[list[int], list[float]]:
        """The int and float slots, in the order of `nodes`."""
        ints = [signed(self.hash_low), signed(self.hash_high), self.elements, self.nan, self.inf]
        floats = [value for value in (self.min, self.max, self.mean, self.l2) if value is not None]
        kinds = set(map(type, self.sample))
        if kinds == {float}:
            return ints, [*floats, *self.sample]  # type: ignore[list-item]  # all are floats
        if kinds == {int}:
            return [*ints, *self.sample], floats  # type: ignore[list-item]  # all are ints
        for value in self.sample:
            if isinstance(value, complex):
                floats += (value.real, value.imag)
            elif isinstance(value, float):
                floats.append(value)
            else:
                ints.append(value)
        return ints, floats

    @classmethod
    def from_record(cls, record: Record) -> TensorDigest | None:
        """The digest that a digest or host_read record carries; None if it carries none."""
        fields: dict[str, Value] = {
            node.name: value for node, value in zip(record.signature.args, record.args, strict=True)
        }
        if "hash_low" not in fields:
            return None

        def whole(name: str) -> int:
            value = fields[name]
            assert isinstance(value, int)
            return value

        def real(name: str) -> float | None:
            value = fields[name]
            return value if isinstance(value, float) else None

        sample = fields["sample"]
        assert isinstance(sample, list)
        return cls(
            whole("hash_low") % _INT64_WRAP,
            whole("hash_high") % _INT64_WRAP,
            whole("elements"),
            whole("nan"),
            whole("inf"),
            real("min"),
            real("max"),
            real("mean"),
            real("l2"),
            tuple(sample),
        )
