"""How far apart two results are, and how far they may be.

Distances are absolute, relative, and in units in the last place (steps between two numbers through the values of their
dtype), of numbers as float64, which hold every floating-point dtype up to 64 bits exactly. NaN agrees with NaN alone,
an infinity with the same one, and neither enters the distances. Zeros of another sign are equal, and counted apart.

A `Tolerance` is a rule for a kernel and a dtype: `exact`, `ulp:N`, `rtol,atol` by dtype, a file by kernel; `auto` comes
from replays (replayed.py). Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.codes import DType
from replayfmt.format.model import TensorDigest, sample_positions
from replayfmt.format.validation import read_json

# Of each dtype: the bits of its fraction, and the exponent of its smallest normal number.
FLOATS: dict[DType, tuple[int, int]] = {
    DType.float64: (52, -1022),
    DType.float32: (23, -126),
    DType.float16: (10, -14),
    DType.bfloat16: (7, -126),
    DType.float8_e4m3fn: (3, -6),
    DType.float8_e5m2: (2, -14),
    DType.float8_e4m3fnuz: (3, -7),
    DType.float8_e5m2fnuz: (2, -15),
    DType.complex128: (52, -1022),
    DType.complex64: (23, -126),
    DType.complex32: (10, -14),
}
_WIDE = {"i": np.float64, "f": np.float64, "c": np.complex128}


@dataclass(frozen=True)
class Allowed:
    """How far apart elements may be: `ulp` steps, or absolute + relative * |a|. All 0: not at all."""

    ulp: int = 0
    relative: float = 0.0
    absolute: float = 0.0

    @property
    def exact(self) -> bool:
        return not (self.ulp or self.relative or self.absolute)


EXACT = Allowed()


@dataclass(frozen=True)
class Distance:
    """`compared` of `elements` elements were compared; `beyond` of them are farther apart than allowed. `absolute`,
    `relative` and `ulp` are the largest distances of finite numbers, None where there are none or the dtype has no such
    unit. `worst` is the row-major index of the element that is farthest off, `a` and `b` its values. `nan` and `inf`
    count such elements in a and b, None where that is not known; `zero_signs` zeros of another sign."""

    elements: int
    compared: int
    different: int
    beyond: int
    absolute: float | None = None
    relative: float | None = None
    ulp: int | None = None
    worst: int | None = None
    a: float | complex | int | None = None
    b: float | complex | int | None = None
    nan: tuple[int, int] | None = None
    inf: tuple[int, int] | None = None
    zero_signs: int = 0
    note: str = ""

    @property
    def share(self) -> float:
        """The share of the compared elements that differ."""
        return self.different / self.compared if self.compared else 0.0

    def __str__(self) -> str:
        if self.note:
            return self.note
        of = "elements" if self.compared == self.elements else f"sampled elements of {self.elements:,}"
        parts = [f"{self.different:,} of {self.compared:,} {of} differ"]
        for name, value in (("absolute", self.absolute), ("relative", self.relative)):
            parts += [f"{name} {value:.3g}"] if value is not None else []
        parts += [f"{self.ulp:,} ULP"] if self.ulp is not None else []
        if self.worst is not None:
            parts.append(f"worst at element {self.worst:,}: {_number(self.a)} against {_number(self.b)}")
        for name, pair in (("NaN", self.nan), ("infinite", self.inf)):
            parts += [f"{name}: {pair[0]:,} against {pair[1]:,}"] if pair and pair[0] != pair[1] else []
        parts += [f"{self.zero_signs:,} zeros of another sign"] if self.zero_signs else []
        return ", ".join(parts)


def _number(value: float | complex | int | None) -> str:
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


def steps(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The place of finite numbers among all values of their dtype; zero is 0."""
    bits, least = FLOATS[dtype]
    fraction, exponent = np.frexp(np.abs(values))
    normal = (exponent - 1) >= least
    # Steps of float64 numbers below the smallest normal one are their bits.
    place = np.where(
        normal,
        ((exponent - 1 - least + 1).astype(np.int64) << bits)
        + np.round((fraction * 2 - 1) * 2.0**bits).astype(np.int64),
        np.round(np.ldexp(np.abs(values), bits - least)).astype(np.int64)
        if least > -1000
        else np.abs(values).view(np.int64),
    )
    return np.where(values < 0, -place, place)


def distance(
    a: np.ndarray,
    b: np.ndarray,
    dtype: DType,
    allowed: Allowed = EXACT,
    positions: np.ndarray | None = None,
    elements: int | None = None,
) -> Distance:
    """The distance of flat arrays of as many elements: float64, complex128, or integers. `positions` are the elements'
    places in the results, of `elements` in all."""
    total = len(a) if elements is None else elements
    with np.errstate(all="ignore"):
        same = (a == b) | ((a != a) & (b != b))
        if same.all():
            signs = int((np.signbit(a.real) != np.signbit(b.real))[a == 0].sum()) if a.dtype.kind in "fc" else 0
            return Distance(total, len(a), 0, 0, 0.0, 0.0, 0 if dtype in FLOATS else None, zero_signs=signs)
        finite = np.isfinite(a) & np.isfinite(b)
        apart = np.where(finite, np.abs(a.astype(_WIDE[a.dtype.kind]) - b), 0.0)
        size = np.where(finite, np.abs(a.astype(_WIDE[a.dtype.kind])), 0.0)
        relative = np.where(size > 0, apart / np.where(size > 0, size, 1.0), 0.0)
        ulp = None
        if dtype in FLOATS and a.dtype.kind in "fc":
            pairs = [(a, b)] if a.dtype.kind == "f" else [(a.real, b.real), (a.imag, b.imag)]
            both = [[steps(np.where(finite, each, 0.0), dtype) for each in pair] for pair in pairs]
            ulp = np.max([np.abs(x - y) for x, y in both], axis=0)
        far = apart > allowed.absolute + allowed.relative * size
        if allowed.ulp and ulp is not None:
            far = ulp > allowed.ulp
        broken = ~finite & ~same
        worst = int(np.argmax(np.where(broken, np.inf, np.where(same, -1.0, apart))))
    return Distance(
        total,
        len(a),
        int((~same).sum()),
        int(((far & ~same) | broken).sum()),
        float(apart.max()) if finite.any() else None,
        float(relative.max()) if finite.any() else None,
        None if ulp is None else int(ulp.max()),
        worst if positions is None else int(positions[worst]),
        a[worst].item(),
        b[worst].item(),
        (int((a != a).sum()), int((b != b).sum())),
        (int(np.isinf(a).sum()), int(np.isinf(b).sum())),
        int((np.signbit(a.real) != np.signbit(b.real))[(a == 0) & (b == 0)].sum()) if a.dtype.kind in "fc" else 0,
    )


def digest_distance(a: TensorDigest, b: TensorDigest, dtype: DType, allowed: Allowed = EXACT) -> Distance:
    """The distance of two results by what their digests hold: the hash, up to 64 elements, counts of NaN and Inf."""
    if (a.hash_low, a.hash_high, a.elements) == (b.hash_low, b.hash_high, b.elements):
        return Distance(a.elements, a.elements, 0, 0, 0.0, nan=(a.nan, b.nan), inf=(a.inf, b.inf))
    if a.elements != b.elements:
        note = f"{a.elements:,} elements against {b.elements:,}"
        return Distance(a.elements, 0, 1, 1, nan=(a.nan, b.nan), inf=(a.inf, b.inf), note=note)
    if not a.sample or len(a.sample) != len(b.sample):
        return Distance(a.elements, 0, 1, 1, note="the digests differ, and hold no elements to compare")
    kind = {int: np.int64, float: np.float64, complex: np.complex128}
    widest = max((type(value) for value in (*a.sample, *b.sample)), key=[int, float, complex].index)
    places = np.array(sample_positions(a.elements))
    samples: list[np.ndarray] = [np.array(each.sample, kind[widest]) for each in (a, b)]
    found = distance(samples[0], samples[1], dtype, allowed, places, a.elements)
    found = replace(found, nan=(a.nan, b.nan), inf=(a.inf, b.inf))
    broken = a.nan != b.nan or a.inf != b.inf
    if found.different:
        return replace(found, beyond=found.beyond or int(broken))
    # What differs is not among the sampled elements: the statistics say at most how far it may be.
    apart = _statistics_apart(a, b) or 0.0
    note = f"the digests differ, but none of {found.compared} sampled elements of {a.elements:,} does"
    if found.zero_signs:
        note = f"{note}, but for the sign of {found.zero_signs} zeros"
    far = allowed.exact or broken or apart > allowed.absolute + allowed.relative
    return replace(found, beyond=int(far), absolute=None, relative=None, ulp=None, note=note)


def _statistics_apart(a: TensorDigest, b: TensorDigest) -> float | None:
    """The largest relative difference of what digests say of all elements."""
    scale = max(abs(a.l2 or 0.0), abs(b.l2 or 0.0)) or 1.0
    pairs = [(a.min, b.min), (a.max, b.max), (a.mean, b.mean), (a.l2, b.l2)]
    known = [abs(x - y) / scale for x, y in pairs if x is not None and y is not None]
    return max(known) if known else None


_EXPECTED = "exact, ulp:N, RTOL,ATOL, DTYPE=RTOL,ATOL;…, auto, or a JSON file of these by kernel"


@dataclass(frozen=True)
class Tolerance:
    """Rules in the order they were given: a pattern of kernel names, a dtype or "" for all, and what is allowed. The
    first that fits decides; where none does, results must be equal."""

    text: str
    rules: tuple[tuple[str, str, Allowed], ...] = ()
    auto: bool = False

    @property
    def exact(self) -> bool:
        return not self.auto and all(allowed.exact for _kernel, _dtype, allowed in self.rules)

    def of(self, kernel: str, dtype: DType) -> Allowed:
        """What is allowed for a result of a kernel, by its qualified name."""
        name = kernel.rpartition(".")[0]
        for pattern, wanted, allowed in self.rules:
            if wanted in ("", dtype.name) and (fnmatchcase(kernel, pattern) or fnmatchcase(name, pattern)):
                return allowed
        return EXACT


def parse_tolerance(text: str) -> Tolerance:
    """The tolerance that a text or the file it names says. Raises UsageError."""
    if text == "auto":
        return Tolerance(text, auto=True)
    path = Path(text)
    if text.endswith(".json"):
        return Tolerance(text, tuple(_from_file(path)))
    return Tolerance(text, tuple(("*", dtype, allowed) for dtype, allowed in _rules(text, f"--tolerance={text}")))


def _rules(text: Any, where: str) -> list[tuple[str, Allowed]]:
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where}: {text!r} is not a tolerance; expected {_EXPECTED}")
    found = []
    for part in text.split(";"):
        dtype, equals, rule = part.strip().rpartition("=")
        if equals and dtype not in DType.__members__:
            raise UsageError(f"{where}: {dtype!r} is not a dtype; expected one such as float32")
        found.append((dtype, _allowed(rule.strip(), where)))
    return found


def _allowed(rule: str, where: str) -> Allowed:
    if rule == "exact":
        return EXACT
    kind, _, number = rule.partition(":")
    try:
        if kind == "ulp" and 0 <= int(number) < 1 << 62:
            return Allowed(ulp=int(number))
        relative, absolute = (float(each) for each in rule.split(","))
        if relative >= 0 and absolute >= 0 and math.isfinite(relative + absolute):
            return Allowed(relative=relative, absolute=absolute)
    except ValueError:
        pass
    raise UsageError(f"{where}: {rule!r} is not a tolerance; expected {_EXPECTED}")


def _from_file(path: Path) -> list[tuple[str, str, Allowed]]:
    wanted = 'expected an object such as {"aten::mm": "1e-5,1e-8", "*": "exact"}'
    given = read_json(path, f"--tolerance={path}", wanted)
    if not isinstance(given, dict) or not given:
        raise UsageError(f"--tolerance={path}: {wanted}")
    return [
        (pattern, dtype, allowed)
        for pattern, text in given.items()
        for dtype, allowed in _rules(text, f"--tolerance={path}: {pattern}")
    ]
