"""A comparison as text for people, and as rows (docs/comparing.md, docs/comparing.schema.json)."""

from __future__ import annotations

from typing import Any

from replayfmt.format.validation import counted, printable

from .distances import Distance
from .results import Comparison, Named
from .structure import StructureDifference

_MOST_STRUCTURE = 8
_MOST_ROOTS = 8
_MOST_BLOCKS = 5
_LONGEST = 160
_MOST_KERNEL_TIMES = 10


def text_lines(made: Comparison) -> list[str]:
    """The first screen says whether they are equal; if not, which op, how far, and what to type next."""
    return [*result_lines(made), *_time_lines(made)]


def _time_lines(made: Comparison) -> list[str]:
    return [] if made.times is None else [_line(label, text) for label, text in made.times.lines(_MOST_KERNEL_TIMES)]


def result_lines(made: Comparison) -> list[str]:
    """All but the times."""
    found = made.divergence
    lines = [
        _line("a", _about(made, 0)),
        _line("b", _about(made, 1)),
        *_structure_lines(made.structure),
        _line("aligned", _aligned(made)),
        *_block_lines(made),
        *(_line("doubtful", text) for text in _doubts(made)),
        _line("compared", _compared(made)),
        *(_line("note", note) for note in made.notes),
    ]
    if made.outcome == "equal":
        return [*lines, _line("equal", f"{counted(found.compared, 'result')}, tolerance {made.tolerance.text}")]
    if made.outcome == "structure":
        why = "no result of both captures could be compared" if not found.compared else "the alignment is doubtful"
        lines.append(_line("not compared", f"{why}: only structure was; this does not say that they are equal"))
        return [*lines, _line("next", _next(made))]
    for number, root in enumerate(made.roots[:_MOST_ROOTS]):
        lines += _root_lines(root, number == 0)
    if len(made.roots) > _MOST_ROOTS:
        lines.append(_line("", f"and {len(made.roots) - _MOST_ROOTS} more"))
    if found.unknown:
        first = made.a.ordinal(found.unknown[0])
        lines.append(
            _line(
                "unknown",
                f"{counted(len(found.unknown), 'op')} with another result, of which it is not known whether their "
                f"inputs are equal; the first is ordinal {first} ({made.a.kernel(found.unknown[0])})",
            )
        )
    if made.first is None:
        lines.append(_line("different", "no op can be named: " + _why_unnamed(made)))
    return [*lines, _line("next", _next(made))]


def _line(label: str, text: str) -> str:
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
            lines.append(_line(what, f"{each.name}: {_cut(each.a)} against {_cut(each.b)}{where}"))
        if len(mine) > _MOST_STRUCTURE:
            lines.append(_line("", f"and {len(mine) - _MOST_STRUCTURE} more"))
    return lines or [_line("structure", "no difference in versions, settings, devices, calls and arguments")]


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
            names = ", ".join(side.kernel(op) for op in ops[:4]) + (
                f" and {len(ops) - 4:,} more" if len(ops) > 4 else ""
            )
            texts.append(f"{names} (from ordinal {side.ordinal(ops[0])})" if ops else "nothing")
        lines.append(_line("unaligned", f"in a {texts[0]}; in b {texts[1]}"))
    if len(blocks) > _MOST_BLOCKS:
        lines.append(_line("", f"and {len(blocks) - _MOST_BLOCKS:,} more groups of ops"))
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
    lines = [_line(label, f"ordinal {places[0]} of a, {places[1]} of b: {what}{scope}{more}{doubt}")]
    known = {"input": "content from outside differs", "randomness": "equal, but for the state of the random generators"}
    lines.append(_line("  inputs", known.get(named.kind, "equal")))
    lines.append(_line("  a", _cut(named.calls[0] or "nothing")))
    if named.calls[1] != named.calls[0]:
        lines.append(_line("  b", _cut(named.calls[1] or "nothing")))
    lines += [_line("  argument", f"{name}: {_cut(one)} against {_cut(other)}") for name, one, other in named.changed]
    lines += [_line("  why", named.note)] if named.note else []
    lines += [_line("  distance", str(named.distance))] if named.distance is not None else []
    if named.consequences:
        lines.append(_line("  led to", f"{counted(named.consequences, 'later op')} with another result"))
    for growth in named.growth if first else ():
        far = "unknown" if growth.relative is None else f"{growth.relative:.3g} relative"
        lines.append(
            _line("  then", f"{far} at ordinal {growth.ordinal} ({growth.kernel}), scope {growth.scope or '-'}")
        )
    return lines


def _why_unnamed(made: Comparison) -> str:
    if made.alignment.doubts:
        return "the alignment is doubtful before the first difference"
    if made.divergence.unknown:
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
    if made.a.replayed is None:
        return f"opreplay-compare --replay {paths} compares the results of replays; or capture with --digests=ops"
    return f"opreplay-compare --format=jsonl {paths} lists everything"


# ----------------------------------------------------------------------------------------------------------------- rows


def rows(made: Comparison) -> list[dict[str, Any]]:
    """One row for the comparison, then those of its parts."""
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
            "what": each.what,
            "name": each.name,
            "a": each.a,
            "b": each.b,
            "count": each.count,
            "at": None if each.at is None else list(each.at),
        }
        for each in made.structure
    ]
    made_rows += [
        {
            "kind": "unaligned",
            "a": [made.a.ordinal(op) for op in block.a],
            "b": [made.b.ordinal(op) for op in block.b],
            "compared": number not in found.alone,
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
        "growth": [vars(each) if hasattr(each, "__dict__") else each for each in named.growth],
        "note": named.note,
    }


def distance_json(found: Distance) -> dict[str, Any]:
    """A distance as plain values."""
    made = {name: getattr(found, name) for name in found.__dataclass_fields__}
    made["share"] = found.share
    for name in ("a", "b"):
        if isinstance(made[name], complex):
            made[name] = [made[name].real, made[name].imag]
    for name in ("nan", "inf"):
        made[name] = None if made[name] is None else list(made[name])
    return made
