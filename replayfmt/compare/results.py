"""What a comparison finds, as values, as text, and as rows (docs/comparing.md, docs/comparing.schema.json).

`compare_times` says what became faster or slower, by the same alignment: by the captured times, of devices where both
captures know them, else of the host, or by medians that opreplay-benchmark --per-op measured. Of ops in one capture
alone the times are what was added and removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.codes import UNKNOWN_NS, DType
from replayfmt.format.model import TensorDigest, TensorValue, tensors_of
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted, printable, some_of

from .alignment import Alignment
from .distances import Distance, Tolerance, digest_distance, distance
from .divergence import NOT_KNOWN, Divergence, Root
from .structure import StructureDifference
from .trace import SCALAR, Side, Trace

_MOST_OPS = 1000


@dataclass(frozen=True)
class KernelTimes:
    """Of a capture: `calls` and `ns` are of paired ops, of a and b; `removed` and `added` are calls and nanoseconds of
    ops that a or b alone has."""

    kernel: str
    calls: int
    ns: tuple[int, int]
    removed: tuple[int, int]
    added: tuple[int, int]

    @property
    def difference_ns(self) -> int:
        return self.ns[1] - self.ns[0] + self.added[1] - self.removed[1]

    @property
    def ratio(self) -> float | None:
        return self.ns[1] / self.ns[0] if self.ns[0] else None


@dataclass(frozen=True)
class OpTimes:
    """One pair of ops."""

    ordinals: tuple[int, int]
    kernel: str
    ns: tuple[int, int]


@dataclass(frozen=True)
class Times:
    """`source` says whose times these are. `kernels` and `ops` begin with the largest difference; `ns` are all of a and
    all of b. `unknown` counts pairs of which a time is not known."""

    source: str
    ns: tuple[int, int]
    kernels: tuple[KernelTimes, ...]
    ops: tuple[OpTimes, ...]
    unknown: int

    def lines(self, most: int) -> Iterator[tuple[str, str]]:
        """For people: labels and texts."""
        ratio = f" ({self.ns[1] / self.ns[0]:.3g} ×)" if self.ns[0] else ""
        unknown = f"; {counted(self.unknown, 'pair')} of ops without a time" if self.unknown else ""
        yield "times", f"{self.source}: {_ms(self.ns[0])} in a, {_ms(self.ns[1])} in b{ratio}{unknown}"
        for each in self.kernels[:most]:
            if not each.difference_ns:
                break
            parts = []
            if each.calls:
                by = f" ({each.ratio:.3g} ×)" if each.ratio is not None else ""
                parts.append(f"{_ms(each.ns[0])} to {_ms(each.ns[1])}{by} in {counted(each.calls, 'paired call')}")
            for (calls, ns), what in ((each.removed, "removed"), (each.added, "added")):
                parts += [f"{counted(calls, 'call')} {what}, {_ms(ns)}"] if calls else []
            yield ("  slower" if each.difference_ns > 0 else "  faster"), f"{each.kernel}: {'; '.join(parts)}"

    def rows(self) -> Iterator[dict[str, Any]]:
        yield {"kind": "times", "source": self.source, "ns": list(self.ns), "unknown": self.unknown}
        for each in self.kernels:
            yield {
                "kind": "kernel_times",
                "kernel": each.kernel,
                "calls": each.calls,
                "ns": list(each.ns),
                "removed": {"calls": each.removed[0], "ns": each.removed[1]},
                "added": {"calls": each.added[0], "ns": each.added[1]},
            }
        for op in self.ops[:_MOST_OPS]:
            yield {"kind": "op_times", "ordinals": list(op.ordinals), "kernel": op.kernel, "ns": list(op.ns)}


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.4g} ms"


def compare_times(
    a: Side, b: Side, alignment: Alignment, measured: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
) -> Times | None:
    """The times of two aligned captures, None if they hold none. `measured` are documents of opreplay-benchmark
    --per-op --benchmark-out, of a and of b. Raises UsageError for documents of other captures, or without ops."""
    sides = (a, b)
    if measured is not None:
        columns = [_measured(side, document) for side, document in zip(sides, measured, strict=True)]
        source = "medians measured in replays"
    else:
        device = [_captured(side.reader, side.trace, device=True) for side in sides]
        host = [_captured(side.reader, side.trace, device=False) for side in sides]
        on_device = all((each >= 0).any() for each in device)
        columns, source = (device, "captured device times") if on_device else (host, "captured host times")
    if not all((each >= 0).any() for each in columns):
        return None
    one, other = columns
    names: dict[str, int] = {}
    kernel = [_kernels(side, names) for side in sides]
    paired = np.flatnonzero(alignment.partner_of_a >= 0)
    its = alignment.partner_of_a[paired]
    known = (one[paired] >= 0) & (other[its] >= 0)
    paired, its, pairs = paired[known], its[known], len(paired)

    def totals(side: int, ops: np.ndarray) -> list[tuple[int, int]]:
        """Calls and nanoseconds of these ops by kernel."""
        calls = np.bincount(kernel[side][ops], minlength=len(names))
        ns = np.bincount(kernel[side][ops], columns[side][ops], minlength=len(names))
        return list(zip(calls.tolist(), ns.astype(np.int64).tolist(), strict=True))

    removed, added = (
        totals(side, np.flatnonzero((partner < 0) & (columns[side] >= 0)))
        for side, partner in enumerate((alignment.partner_of_a, alignment.partner_of_b))
    )
    # By the name in a, also where b calls another kernel there.
    before = totals(0, paired)
    after = np.bincount(kernel[0][paired], other[its], minlength=len(names)).astype(np.int64).tolist()
    kernels = [
        KernelTimes(name, before[k][0], (before[k][1], after[k]), removed[k], added[k]) for name, k in names.items()
    ]
    order = np.argsort(-np.abs(other[its] - one[paired]), kind="stable")[:_MOST_OPS]
    shown = list(names)
    ops = [
        OpTimes((a.ordinal(op), b.ordinal(that)), shown[kernel[0][op]], (int(one[op]), int(other[that])))
        for op, that in zip(paired[order].tolist(), its[order].tolist(), strict=True)
    ]
    return Times(
        source,
        (int(one[one >= 0].sum()), int(other[other >= 0].sum())),
        tuple(sorted(kernels, key=lambda each: -abs(each.difference_ns))),
        tuple(ops),
        pairs - len(paired),
    )


def _kernels(side: Side, names: dict[str, int]) -> np.ndarray:
    """The number of each op's kernel, by its name."""
    reader = side.reader
    number = np.zeros(len(reader.signatures), np.int64)
    for place, signature in enumerate(reader.signatures):
        if signature is not None and signature.kernel:
            number[place] = names.setdefault(reader.kernels[signature.kernel].qualified_name, len(names))
    frames = [reader.frame(place) for place in range(len(reader.record_frames))]
    found = [number[frame.signature[_rows(frame, side.trace)]] for frame in frames]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _rows(frame: Any, trace: Trace) -> np.ndarray:
    first, count = frame.first_ordinal, len(frame.signature)
    begin, end = np.searchsorted(trace.ordinal, [first, first + count])
    return np.asarray(trace.ordinal[begin:end] - first)


def _captured(reader: CaptureReader, trace: Trace, *, device: bool) -> np.ndarray:
    """Captured nanoseconds by op, -1 where unknown."""
    columns = []
    for number in range(len(reader.record_frames)):
        frame = reader.frame(number)
        rows = _rows(frame, trace)
        column = frame.device_duration_ns if device else frame.duration_ns
        columns.append(np.full(len(rows), UNKNOWN_NS) if column is None else column[rows])
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, np.int64)


def _measured(side: Side, document: Mapping[str, Any]) -> np.ndarray:
    """Measured nanoseconds by op, -1 where unknown: those of the op that was measured for all that are called alike."""
    session = document["context"].get("capture_session")
    if session != side.reader.session.session_id:
        raise UsageError(f"--benchmark: was measured of another capture than {side.reader.path}: session {session}")
    trace, found = side.trace, np.full(side.trace.ops, -1, np.int64)
    order = np.argsort(trace.key, kind="stable")
    for row in document["benchmarks"]:
        ordinal, time = row.get("ordinal"), row.get("median_real_time")
        if not isinstance(ordinal, int) or not isinstance(time, int | float):
            continue
        op = trace.op_at(ordinal)
        if op >= 0:
            key = trace.key[op]
            begin, end = np.searchsorted(trace.key[order], key, "left"), np.searchsorted(trace.key[order], key, "right")
            found[order[begin:end]] = int(time)
    if not (found >= 0).any():
        raise UsageError("--benchmark: has no ops; expected what opreplay-benchmark --per-op --benchmark-out wrote")
    return found


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
        if found.different or found.unknown or found.roots or found.inherited or found.alone:
            return "different"
        return "equal" if found.compared else "structure"

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
    if int(a.trace.observed_as[one]) == SCALAR:
        values = [
            np.array([float(each) for each in side.record(place).results if isinstance(each, int | float)], np.float64)
            for side, place in ((a, op), (b, its))
        ]
        if len(values[0]) != len(values[1]) or not len(values[0]):
            return Distance(len(values[0]), 0, 1, 1, note=f"{values[0].tolist()} against {values[1].tolist()}")
        dtype = next((each.meta.dtype for each in tensors_of(a.record(op).args)), DType.float64)
        return distance(values[0], values[1], dtype, rule.of(kernel, dtype))
    digests = digest_of(a, one), digest_of(b, other)
    if digests[0] is None or digests[1] is None:
        return Distance(0, 0, 1, 1, note="the captures only say that the results differ")
    dtype = dtype_of(a, one)
    return digest_distance(digests[0], digests[1], dtype, rule.of(kernel, dtype))


def digest_of(side: Side, place: int) -> TensorDigest | None:
    if side.replayed is not None:
        return side.replayed.get(place)
    return TensorDigest.from_record(side.reader.record(int(side.trace.observed_at[place])))


def dtype_of(side: Side, place: int) -> DType:
    record = side.reader.record(int(side.trace.observed_at[place]))
    if record.signature.kernel:  # made by a replay: of the op itself
        tensors = list(tensors_of((*record.results, *record.args)))
        shapes = int(side.trace.observed_as[place])
        return tensors[min(shapes, len(tensors) - 1)].meta.dtype if tensors else DType.none
    tensor = record.argument("tensor")
    return tensor.meta.dtype if isinstance(tensor, TensorValue) else DType.none


_MOST_STRUCTURE = 8
_MOST_ROOTS = 8
_MOST_BLOCKS = 5
_LONGEST = 160
_MOST_KERNEL_TIMES = 10


def text_lines(made: Comparison) -> list[str]:
    """The first screen says whether they are equal; if not, which op, how far, and what to type next."""
    times = [] if made.times is None else made.times.lines(_MOST_KERNEL_TIMES)
    return [*result_lines(made), *(line(label, text) for label, text in times)]


def result_lines(made: Comparison) -> list[str]:
    """All but the times."""
    found = made.divergence
    lines = [
        line("a", _about(made, 0)),
        line("b", _about(made, 1)),
        *_structure_lines(made.structure),
        line("aligned", _aligned(made)),
        *_block_lines(made),
        *(line("doubtful", text) for text in _doubts(made)),
        line("compared", _compared(made)),
        *(line("note", note) for note in made.notes),
    ]
    if made.outcome == "equal":
        return [*lines, line("equal", f"{counted(found.compared, 'result')}, tolerance {made.tolerance.text}")]
    if made.outcome == "structure":
        why = "no result of both captures could be compared: only structure was"
        lines.append(line("not compared", f"{why}; this does not say that they are equal"))
        return [*lines, line("next", _next(made))]
    for number, root in enumerate(made.roots[:_MOST_ROOTS]):
        lines += _root_lines(root, number == 0)
    if len(made.roots) > _MOST_ROOTS:
        lines.append(line("", f"and {len(made.roots) - _MOST_ROOTS} more"))
    seen = [op for op in found.unknown if found.results[op] != NOT_KNOWN]
    unknown = "how far rounding may move it" if made.tolerance.auto else "whether their inputs are equal"
    for ops, what in (
        (seen, f"with another result, of which it is not known {unknown}"),
        (sorted({*found.unknown}.difference(seen)), "behind a call with other arguments, of which no result is known"),
    ):
        if ops:
            first = f"ordinal {made.a.ordinal(ops[0])} ({made.a.kernel(ops[0])})"
            lines.append(line("unknown", f"{counted(len(ops), 'op')} {what}; the first is {first}"))
    if made.first is None:
        lines.append(line("different", "no op can be named: " + _why_unnamed(made)))
    return [*lines, line("next", _next(made))]


def line(label: str, text: str) -> str:
    """A line for people, behind its label."""
    return f"{label:<14}{printable(text, 2000)}"


def _about(made: Comparison, which: int) -> str:
    side = (made.a, made.b)[which]
    session = side.reader.session
    digests = "from a replay" if side.replayed is not None else session.policies.get("digests", "unknown")
    return f"{side.reader.path}: {side.trace.ops:,} ops, torch {session.torch_version or 'unknown'}, digests {digests}"


def _structure_lines(structure: list[StructureDifference]) -> list[str]:
    lines = []
    for what in dict.fromkeys(each.what for each in structure):
        mine = [each for each in structure if each.what == what]
        for each in mine[:_MOST_STRUCTURE]:
            where = f" (ordinals {each.at[0]} and {each.at[1]}; {counted(each.count, 'op')})" if each.at else ""
            lines.append(line(what, f"{each.name}: {_cut(each.a)} against {_cut(each.b)}{where}"))
        if len(mine) > _MOST_STRUCTURE:
            lines.append(line("", f"and {len(mine) - _MOST_STRUCTURE} more"))
    return lines or [line("structure", "no difference in versions, settings, devices, calls and arguments")]


def _cut(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _aligned(made: Comparison) -> str:
    one, other, pairs = made.a.trace.ops, made.b.trace.ops, made.alignment.pairs
    return f"{pairs:,} ops, of {one:,} in a and {other:,} in b ({100 * made.alignment.share:.4g}% of both)"


def _block_lines(made: Comparison) -> list[str]:
    lines = []
    blocks = made.alignment.blocks
    for block in blocks[:_MOST_BLOCKS]:
        texts = []
        for side, ops in ((made.a, block.a), (made.b, block.b)):
            names = some_of(ops, 4, side.kernel)
            texts.append(f"{names} (from ordinal {side.ordinal(ops[0])})" if ops else "nothing")
        lines.append(line("unaligned", f"in a {texts[0]}; in b {texts[1]}"))
    if len(blocks) > _MOST_BLOCKS:
        lines.append(line("", f"and {len(blocks) - _MOST_BLOCKS:,} more groups of ops"))
    return lines


def _doubts(made: Comparison) -> list[str]:
    return [
        f"from ordinal {made.a.ordinal(op)} of a and {made.b.ordinal(other)} of b on it is not certain which ops "
        f"belong together; what lies behind is not called the first divergence"
        for op, other in made.alignment.doubts[:1]
    ]


def _compared(made: Comparison) -> str:
    found = made.divergence
    equal = found.compared - found.different - found.within
    text = f"{counted(found.compared, 'result')}: {equal:,} equal, {found.different:,} differ"
    return f"{text}, {found.within:,} within the tolerance {made.tolerance.text}" if found.within else text


def _root_lines(named: Named, first: bool) -> list[str]:
    doubt = "; behind a doubtful alignment, so perhaps not" if named.root.doubtful else ""
    places = [", ".join(map(str, ordinals[:4])) or "nothing" for ordinals in named.ordinals]
    kernels = [", ".join(names) for names in named.kernels]
    label = "different" if not first else "first"
    what = kernels[0] if kernels[0] == kernels[1] else f"{kernels[0] or 'nothing'} against {kernels[1] or 'nothing'}"
    scope = f", scope {named.scope}" if named.scope else ""
    more = f", and {named.alike} more like it" if named.alike else ""
    lines = [line(label, f"ordinal {places[0]} of a, {places[1]} of b: {what}{scope}{more}{doubt}")]
    known = {"input": "content from outside differs", "randomness": "equal, but for the state of the random generators"}
    lines.append(line("  inputs", known.get(named.kind, "equal")))
    lines.append(line("  a", _cut(named.calls[0] or "nothing")))
    if named.calls[1] != named.calls[0]:
        lines.append(line("  b", _cut(named.calls[1] or "nothing")))
    lines += [line("  argument", f"{name}: {_cut(one)} against {_cut(other)}") for name, one, other in named.changed]
    lines += [line("  why", named.note)] if named.note else []
    lines += [line("  distance", str(named.distance))] if named.distance is not None else []
    if named.consequences:
        lines.append(line("  led to", f"{counted(named.consequences, 'later op')} with another result"))
    for growth in named.growth if first else ():
        far = "unknown" if growth.relative is None else f"{growth.relative:.3g} relative"
        lines.append(
            line("  then", f"{far} at ordinal {growth.ordinal} ({growth.kernel}), scope {growth.scope or '-'}")
        )
    return lines


def _why_unnamed(made: Comparison) -> str:
    if made.alignment.doubts:
        return "the alignment is doubtful before the first difference"
    if made.divergence.unknown and not made.divergence.different:
        return "ops are called differently, and no result that follows is known"
    if made.divergence.unknown and made.tolerance.auto:
        return "ops whose tolerance cannot be derived have another result"
    if made.divergence.unknown or made.divergence.inherited:
        return "of no op with another result are the inputs known to be equal"
    if made.divergence.alone and not made.divergence.different:
        return "the captures hold ops that have no counterpart"
    return "what differs is the structure"


def _next(made: Comparison) -> str:
    paths = f"{made.a.reader.path} {made.b.reader.path}"
    if made.first is not None and made.first.ordinals[0]:
        ordinal = made.first.ordinals[0][0]
        return f"opreplay-dump --ops={ordinal}:{ordinal + 1} {made.a.reader.path}"
    if made.first is not None:
        ordinal = made.first.ordinals[1][0]
        return f"opreplay-dump --ops={ordinal}:{ordinal + 1} {made.b.reader.path}"
    everywhere = all(side.reader.session.policies.get("digests") == "ops" for side in (made.a, made.b))
    if made.a.replayed is None and not everywhere:
        return f"opreplay-compare --replay {paths} compares the results of replays; or capture with --digests=ops"
    return f"opreplay-compare --format=jsonl {paths} lists everything"


def rows(made: Comparison) -> list[dict[str, Any]]:
    found = made.divergence
    first = made.first
    head = {
        "kind": "comparison",
        "a": made.a.reader.path,
        "b": made.b.reader.path,
        "outcome": made.outcome,
        "tolerance": made.tolerance.text,
        "replayed": made.a.replayed is not None or made.b.replayed is not None,
        "ops": [made.a.trace.ops, made.b.trace.ops],
        "aligned": made.alignment.pairs,
        "share": made.alignment.share,
        "doubtful_from": [made.a.ordinal(made.alignment.doubts[0][0]), made.b.ordinal(made.alignment.doubts[0][1])]
        if made.alignment.doubts
        else None,
        "results": {
            "compared": found.compared,
            "equal": found.compared - found.different - found.within,
            "within": found.within,
            "different": found.different,
        },
        "inputs_unknown": [made.a.ordinal(op) for op in found.unknown[:1000]],
        "first": list(map(list, first.ordinals)) if first is not None else None,
        "notes": made.notes,
    }
    made_rows = [head]
    made_rows += [
        {
            "kind": "structure",
            **{name: getattr(each, name) for name in ("what", "name", "a", "b", "count")},
            "at": None if each.at is None else list(each.at),
        }
        for each in made.structure
    ]
    made_rows += [
        {
            "kind": "unaligned",
            "a": [made.a.ordinal(op) for op in block.a],
            "b": [made.b.ordinal(op) for op in block.b],
            "compared": number not in found.alone and number not in found.aside,
        }
        for number, block in enumerate(made.alignment.blocks)
    ]
    made_rows += [_divergence_row(each) for each in made.roots]
    made_rows += [] if made.times is None else made.times.rows()
    return made_rows


def _divergence_row(named: Named) -> dict[str, Any]:
    return {
        "kind": "divergence",
        "what": named.kind,
        "a": list(named.ordinals[0]),
        "b": list(named.ordinals[1]),
        "kernels": list(map(list, named.kernels)),
        "calls": list(named.calls),
        "scope": named.scope,
        "doubtful": named.root.doubtful,
        "alike": named.alike,
        "changed": [{"name": name, "a": one, "b": other} for name, one, other in named.changed],
        "distance": None if named.distance is None else distance_json(named.distance),
        "consequences": named.consequences,
        "growth": [vars(each) for each in named.growth],
        "note": named.note,
    }


def distance_json(found: Distance) -> dict[str, Any]:
    made = {name: getattr(found, name) for name in found.__dataclass_fields__}
    made["share"] = found.share
    for name in ("a", "b"):
        if isinstance(made[name], complex):
            made[name] = [made[name].real, made[name].imag]
    for name in ("nan", "inf"):
        made[name] = None if made[name] is None else list(made[name])
    return made
