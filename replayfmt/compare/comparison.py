"""Two captures compared: structure first, then where results part.

Results are compared by their digests: those of the captures, or with `replay` those of replays made here. An outcome is
`equal` only where results were compared and everything that has a result was; see `Comparison.outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from os import PathLike
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.model import RECORDED_FROM, TRIMMED_SELECTION
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.validation import counted

from .alignment import align, align_recorded
from .distances import Tolerance, parse_tolerance
from .divergence import Root, diverge
from .results import Comparison, Growth, Named, NotComparable, compare_times, observed_distance, rows, text_lines
from .structure import argument_differences, changed_arguments, count_differences, origin_differences
from .trace import Side, Trace, read_trace

Progress = Callable[[str, int, int], None]
_GROWTH_POINTS = 6
_MEASURED = 64  # consequences of a root whose distances are measured


def compare(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    tolerance: str = "exact",
    replay: bool = False,
    times: bool = False,
    benchmarks: tuple[str | PathLike[str], ...] = (),
    on_progress: Progress = lambda doing, done, total: None,
    **options: Any,
) -> Comparison:
    """Compare two captures. `tolerance` is as for opreplay-compare; with `replay` results come from replays here, with
    `options` of a Plan. With `times` it also says what became faster or slower, by the captured times or by two files
    of `benchmarks`, which opreplay-benchmark --per-op wrote of a and of b. `on_progress(what, records done, of all)` is
    called now and then.

    Raises UsageError, NotComparable, what opening a file raises, and with `replay` what a replay raises.
    """
    rule = parse_tolerance(tolerance)
    if options and not (replay or rule.auto):
        raise UsageError(f"{', '.join(sorted(options))}: only with --replay or --tolerance=auto")
    measured = _read_benchmarks(benchmarks)
    readers = [open_capture(path) for path in (a, b)]
    with ExitStack() as stack:
        for reader in readers:
            stack.callback(reader.close)
        sides = [Side(reader, _trace(reader, on_progress)) for reader in readers]
        stack.pop_all()  # the result reads more of them
    if replay:
        from .replayed import replayed_sides

        sides = replayed_sides(sides, options, on_progress)
    made = _compared(sides[0], sides[1], rule, replay, options, on_progress)
    if times or benchmarks:
        made.times = compare_times(made.a, made.b, made.alignment, measured)
        if made.times is None:
            made.notes.append("no times: the captures do not say how long their ops took")
    made.text, made.rows = "\n".join(text_lines(made)), tuple(rows(made))
    return made


def _read_benchmarks(paths: tuple[str | PathLike[str], ...]) -> Any:
    if not paths:
        return None
    if len(paths) != 2:
        raise UsageError(f"--benchmark: expected two files, of a and of b, not {len(paths)}")
    from replayfmt.benchmark.baseline import read_baseline

    return tuple(read_baseline(path, "--benchmark") for path in paths)


def _same_ops(a: Side, b: Side) -> bool:
    """Whether both are replays of one capture, or one is of the other, so that the n-th ops belong together."""
    sessions = [each.reader.session for each in (a, b)]
    origins = {(s.policies.get(RECORDED_FROM, s.session_id), s.policies.get(TRIMMED_SELECTION)) for s in sessions}
    return len(origins) == 1 and np.array_equal(a.trace.loose, b.trace.loose)


def _trace(reader: CaptureReader, on_progress: Progress) -> Trace:
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        on_progress(f"reading {reader.path}", done, reader.record_count)

    return read_trace(reader, more)


def _compared(
    a: Side, b: Side, rule: Tolerance, replay: bool, options: Mapping[str, Any], on_progress: Progress
) -> Comparison:
    alignment = align_recorded(a.trace, b.trace) if _same_ops(a, b) else align(a.trace, b.trace)
    kernels = {kernel.name for kernel in a.reader.kernels if kernel} & {k.name for k in b.reader.kernels if k}
    if not a.trace.ops or not b.trace.ops or (not kernels and not alignment.pairs):
        raise NotComparable(
            f"{a.reader.path} and {b.reader.path} have no kernel in common ({a.trace.ops:,} and {b.trace.ops:,} ops); "
            f"compare captures of the same work (opreplay-dump shows what each holds)"
        )
    structure = [
        *origin_differences(a.reader, b.reader),
        *count_differences(a.reader, b.reader),
        *argument_differences(a.reader, b.reader, (a.trace, b.trace), alignment),
    ]
    found = diverge(a.trace, b.trace, alignment)
    if replay and found.observed:
        from .replayed import with_digests

        a, b = with_digests([a, b], found.observed, options, on_progress)
    if not (rule.exact or rule.auto):
        found = diverge(a.trace, b.trace, alignment, lambda one, other: observed_distance(a, b, one, other, rule))
    notes = [
        f"{side.reader.path} is incomplete ({side.reader.incomplete_reason}): what it lacks at its end is not compared"
        for side in (a, b)
        if not side.reader.complete
    ]
    notes += [f"{side.reader.path}: {warning}" for side in (a, b) for warning in side.reader.warnings]
    if found.aside:
        ops = sum(len(alignment.blocks[number].a) + len(alignment.blocks[number].b) for number in found.aside)
        notes.append(
            f"{counted(ops, 'op')} of one capture alone only look at what both compute: nothing else reads their "
            f"results, which are gone at the end"
        )
    made = Comparison(a, b, rule, structure, alignment, found, notes=notes)
    if rule.auto:
        from .replayed import explain

        explain(made, options, on_progress)
    made.roots = name_roots(made)
    return made


def name_roots(made: Comparison) -> list[Named]:
    """Describe the roots; those of one kind and kernel together, by the first of them."""
    groups: dict[tuple[str, Any, bool], Named] = {}
    for number, root in enumerate(made.divergence.roots):
        kernels = tuple(tuple(side.kernel(op) for op in ops[:8]) for side, ops in ((made.a, root.a), (made.b, root.b)))
        key = root.kind, None if root.kind == "randomness" else kernels, root.doubtful
        if key in groups:
            groups[key].alike += 1
            groups[key].consequences += made.divergence.consequences(number)
        else:
            groups[key] = _named(made, number, root, kernels)  # type: ignore[arg-type]
    return list(groups.values())


def _named(made: Comparison, number: int, root: Root, kernels: tuple[tuple[str, ...], tuple[str, ...]]) -> Named:
    a, b = made.a, made.b
    calls = tuple("; ".join(side.call(op) for op in ops[:4]) for side, ops in ((a, root.a), (b, root.b)))
    changed = []
    if len(root.a) == len(root.b) == 1:
        changed = changed_arguments(a.record(root.a[0]), b.record(root.b[0]))
    note = {
        "randomness": "the random generators are in another state: seeds differ, or one program drew more before",
        "input": "it reads content from outside that is not the same in both captures",
        "arguments": "it is called differently",
    }.get(root.kind, "")
    if root.kind == "op":
        reads = slice(int(a.trace.read_first[root.a[0]]), int(a.trace.read_first[root.a[0] + 1]))
        if (a.trace.value_content[a.trace.read_value[reads]] == 1).any():
            note = "it reads memory that nothing wrote"
    far = None
    if root.observed is not None:
        far = observed_distance(a, b, *root.observed, made.tolerance)
    at = root.a[0] if root.a else None
    return Named(
        root,
        root.kind,
        tuple(tuple(side.ordinal(op) for op in ops) for side, ops in ((a, root.a), (b, root.b))),  # type: ignore[arg-type]
        kernels,
        calls,  # type: ignore[arg-type]
        a.scope(at) if at is not None else b.scope(root.b[0]),
        changed,
        far,
        made.divergence.consequences(number),
        _growth(made, number),
        note=note,
    )


def _growth(made: Comparison, number: int) -> list[Growth]:
    """How the error goes on behind a root, by scope, or else along the capture."""
    a = made.a
    observed = {int(a.trace.observed_op[one]): (one, other) for one, other in reversed(made.divergence.observed)}
    ops = sorted(op for op, root in made.divergence.consequence_of.items() if root == number and op in observed)
    if not ops:
        return []
    scopes: dict[str, list[int]] = {}
    for op in ops[:: max(1, len(ops) // _MEASURED)]:
        scopes.setdefault(a.scope(op), []).append(op)
    groups = list(scopes.items())
    if len(groups) == 1:
        name, mine = groups[0]
        size = max(1, -(-len(mine) // _GROWTH_POINTS))
        groups = [(name, mine[start : start + size]) for start in range(0, len(mine), size)]
    found = []
    for name, mine in groups[:_GROWTH_POINTS]:
        far = [(observed_distance(a, made.b, *observed[op], made.tolerance).relative, op) for op in mine]
        known = [each for each in far if each[0] is not None]
        relative, op = max(known) if known else (None, mine[0])
        found.append(Growth(name, a.ordinal(op), a.kernel(op), len(mine), relative))
    return found
