"""What a report says: everything on its page, in sections of plain values, before any library sees it.

Sections: capture against replay, baseline, energy, memory, timelines, verification. Those on kernels and on probes have
modules of their own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from replayfmt.benchmark.baseline import BaselineComparison, Document, compare_with_baseline
from replayfmt.dump.definitions import summary_facts
from replayfmt.dump.row_templates import scope_path
from replayfmt.errors import UsageError
from replayfmt.format.memory import DeviceMemory, PeakShare, memory_by_device
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted, printable, some_of

from .findings import Finding, findings
from .kernel_sections import MOST_ROWS, KernelFigures, Section, call_site_table, kernel_table, roofline, top_kernels
from .measurements import Fields, IsolatedTimes, read_measurements
from .ops import CapturedOps, call_sites, captured_ops, clock_of, kernel_totals
from .pictures import (
    CATEGORIES,
    LONGEST_TEXT,
    Axis,
    BarPicture,
    BarSeries,
    Line,
    MissingPicture,
    Picture,
    Region,
    ReportTable,
    StepPicture,
    TableRow,
    TimelinePicture,
    count_cell,
    figure_cell,
    seconds,
    si,
    table_columns,
    text_cell,
    time_cell,
)
from .probe_section import ProbeRun, probe_section
from .timelines import Lane, NameTable, ReplayedTrace, captured_lanes, isolated_lanes, replayed_lanes, timeline_of

if TYPE_CHECKING:
    from replayfmt.compare.results import Comparison

_WHOLE = "the whole capture"
_SHOWN_BARS = 30


def captured_and_replayed(figures: KernelFigures) -> Section:
    """What regions took during capture, what their replay takes, and what their isolated calls add up to."""
    command = figures.command("benchmark --benchmark-out=whole.json")
    missing = f"no benchmark of whole replays was given. Measure them with {command}, then add --benchmark=whole.json"
    isolated = _isolated_seconds(figures)
    about = [
        "Captured times include the recorder's own work, and the program's between ops. A replay runs the same ops "
        "without the program. Isolated calls, each in a loop of its own, find their inputs in the caches, or not: "
        "their sum need not be the time of the replay."
    ]
    wholes = figures.measured.wholes
    if not wholes:
        return Section("replay", "Captured and replayed", about, [MissingPicture("replay", "Times", missing)])
    names = [each.name or _WHOLE for each in wholes]
    series = [
        BarSeries("captured", [seconds(each.captured_ns) for each in wholes]),
        BarSeries(
            "replayed, median",
            [seconds(each.median_ns) for each in wholes],
            [seconds(each.low_ns) for each in wholes],
            [seconds(each.high_ns) for each in wholes],
        ),
        BarSeries("isolated calls, summed", [None if each.name else isolated for each in wholes]),
    ]
    series = [each for each in series if any(value is not None for value in each.values)]
    rows = [
        TableRow(
            text_cell(name),
            time_cell(each.captured_ns, each.reasons.get("captured", "")),
            time_cell(each.median_ns, each.reasons.get("median", "")),
            time_cell(each.low_ns, "the benchmark has no interval"),
            time_cell(each.high_ns, "the benchmark has no interval"),
            figure_cell(
                each.median_ns / each.captured_ns if each.median_ns and each.captured_ns else None,
                "×",
                "one of the two times is not known",
            ),
        )
        for name, each in zip(names, wholes, strict=True)
    ]
    columns = ("region", "captured", "replayed, median", "at least", "at most", "replayed / captured")
    table = ReportTable("regions", "Regions", table_columns(columns), rows, None)
    notes = _about_the_sum(figures)
    picture = BarPicture("replay", "Times", Axis("", "s"), names, series)
    return Section("replay", "Captured and replayed", about, [picture], [table], notes)


def _isolated_seconds(figures: KernelFigures) -> float | None:
    """The sum over the measured calls of the capture; None if there are none."""
    known = [each.total_ns for each in figures.calls_by_kernel.values() if each.calls and each.total_ns is not None]
    return sum(known) / 1e9 if known else None


def _about_the_sum(figures: KernelFigures) -> list[str]:
    """Why the sum of isolated calls is not known, or what it leaves out."""
    if not figures.measured.any_calls:
        return [f"Sum of isolated calls: not measured: {figures.no_calls}."]
    found = [(each.calls, figures.calls_by_kernel.get(each.kernel)) for each in figures.kernels]
    calls = sum(calls for calls, _of in found)
    known = sum(of.calls for _calls, of in found if of is not None and of.total_ns is not None)
    if known >= calls:
        return []
    partly = sum(of is None or of.calls < calls for calls, of in found)
    return [
        f"Sum of isolated calls: of {known:,} of {calls:,} calls ({known / calls:.1%}); "
        f"not all calls of {counted(partly, 'kernel')} have an isolated time."
    ]


def comparison_section(made: Comparison) -> Section:
    """Where another capture parts from this one, and what is faster or slower there."""
    from replayfmt.compare.results import result_lines  # a report without a comparison is spared these imports

    roots = [
        TableRow(
            text_cell(", ".join(map(str, root.ordinals[0][:4]))),
            text_cell(", ".join(map(str, root.ordinals[1][:4]))),
            text_cell(", ".join(root.kernels[0] or root.kernels[1]), root.calls[0]),
            text_cell(root.scope),
            text_cell(f"{root.kind}, doubtful" if root.root.doubtful else root.kind, root.note),
            text_cell("" if root.distance is None else str(root.distance)),
            count_cell(root.consequences),
        )
        for root in made.roots[:MOST_ROWS]
    ]
    titles = ("ordinal here", "in B", "kernel", "scope", "what differs", "distance", "later ops")
    tables = [ReportTable("divergences", "Where they part", table_columns(titles, texts=(0, 1, 2, 3, 4, 5)), roots)]
    if made.times is not None:
        times = [
            TableRow(
                text_cell(each.kernel),
                count_cell(each.calls),
                time_cell(each.ns[0], ""),
                time_cell(each.ns[1], ""),
                figure_cell(each.ratio, "×", "nothing to divide by"),
                count_cell(each.removed[0]),
                count_cell(each.added[0]),
                time_cell(each.difference_ns, ""),
            )
            for each in made.times.kernels[:MOST_ROWS]
        ]
        columns = table_columns(("kernel", "paired calls", "here", "in B", "ratio", "removed", "added", "difference"))
        tables.append(ReportTable("compared-times", f"Times ({made.times.source})", columns, times))
    about = [f"Ops are paired with those of {made.b.reader.path} by what they compute. The outcome: {made.outcome}."]
    return Section(
        "comparison",
        "Another capture",
        about,
        [],
        tables,
        [printable(each, LONGEST_TEXT) for each in result_lines(made)],
    )


def baseline_section(comparison: BaselineComparison) -> Section:
    """Each row against that of the same name in an earlier file."""
    rows = [
        TableRow(
            text_cell(row.name),
            time_cell(row.before.value, row.before.reason),
            time_cell(row.after.value, row.after.reason),
            figure_cell(row.ratio, "×", row.reason),
            figure_cell(row.ratio_low, "×", row.reason),
            figure_cell(row.ratio_high, "×", row.reason),
            text_cell(row.verdict, row.reason),
        )
        for row in comparison.rows[:MOST_ROWS]
    ]
    table = ReportTable(
        "baseline-rows",
        "Rows",
        table_columns(("row", "before", "now", "ratio", "at least", "at most", "verdict"), texts=(0, 6)),
        rows,
        3,
    )
    notes = [f"Another {printable(each)}." for each in comparison.differences]
    for title, names in (
        ("Only in the baseline", comparison.only_before),
        ("Not in the baseline", comparison.only_after),
    ):
        if names:
            notes.append(f"{title}: {some_of(names, 10, lambda name: printable(name, 200), '; ')}.")
    if len(comparison.rows) > MOST_ROWS:
        notes.append(f"{len(comparison.rows) - MOST_ROWS:,} more rows are left out of the page.")
    decided = [row for row in comparison.rows if row.ratio and row.ratio_low and row.ratio_high]
    furthest = sorted(decided, key=lambda row: -max(row.ratio or 1.0, 1 / (row.ratio or 1.0)))[:_SHOWN_BARS]
    picture: Picture
    if not furthest:
        picture = MissingPicture("baseline", "Change", "no row has an interval in both files")
    else:
        bars = BarSeries(
            "",
            [(row.ratio or 1.0) - 1 for row in furthest],
            [(row.ratio_low or 1.0) - 1 for row in furthest],
            [(row.ratio_high or 1.0) - 1 for row in furthest],
        )
        title = (
            "Change" if len(furthest) == len(decided) else f"Change, the {len(furthest)} largest of {len(decided):,}"
        )
        labels = [row.name.removeprefix("BM_op/") for row in furthest]
        picture = BarPicture("baseline", title, Axis("slower is to the right", "%"), labels, [bars])
    about = [
        f"{comparison.summary().capitalize()}. Baseline: {printable(comparison.path)}. A ratio above 1 is slower now; "
        "where its interval contains 1, there is no measurable difference."
    ]
    return Section("baseline", "Compared with the baseline", about, [picture], [table], notes)


def energy_section(energy: Fields | None, figures: KernelFigures) -> Section:
    """Joules of the whole and of isolated kernels, and whether they add up."""
    title = "Energy"
    if energy is None:
        return Section("energy", title, [], [MissingPicture("energy", title, figures.no_energy)])
    parts = [(name, energy.fields(name)) for name in ("idle", "whole_model", "program") if energy.has(name)]
    parts += [(each.text("name"), each) for each in energy.rows("scopes")]
    rows = [
        TableRow(
            text_cell(name.replace("_", " ")),
            count_cell(part.count("runs")),
            figure_cell(part.number("joules_per_run"), "J", _reason(part)),
            figure_cell(part.number("joules"), "J", _reason(part)),
            figure_cell(part.amount("error_joules"), "J", _reason(part)),
            figure_cell(part.amount("mean_watts"), "W", _reason(part)),
            figure_cell(part.amount("seconds"), "s", _reason(part)),
            count_cell(part.count("samples")),
        )
        for name, part in parts
    ]
    columns = ("what", "runs", "a run", "joules", "± at most", "mean power", "seconds", "samples")
    isolated, comparison = energy.fields("isolated_kernels"), energy.fields("comparison")
    whole, predicted = comparison.number("whole_joules_per_run"), comparison.number("predicted_joules_per_run")
    rest = isolated.number("estimated_joules_of_the_rest")
    values = {"whole model": whole, "isolated kernels, predicted": predicted, "the rest, estimated": rest}
    known = {name: value for name, value in values.items() if value is not None}
    picture: Picture = (
        BarPicture("energy", "A run", Axis("", "J"), list(known), [BarSeries("", list(known.values()))])
        if known
        else MissingPicture("energy", "A run", _reason(comparison))
    )
    ratio = comparison.number("ratio")
    verdict = (
        f"Isolated kernels predict {si(ratio, '×')} the energy of the whole"
        if ratio is not None
        else f"Isolated kernels against the whole: not measured: {_reason(comparison)}"
    )
    about = [
        f"{verdict}; {isolated.count('measured'):,} of {isolated.count('distinct'):,} distinct kernels were measured, "
        f"{isolated.count('unmeasurable'):,} are unmeasurable, {isolated.count('not_run'):,} were not run. Idle power "
        "is in every figure."
    ]
    notes = [f"Warning: {printable(each)}." for each in energy.texts("warnings")]
    log = energy.fields("power_log")
    notes.append(f"Power log: {printable(log.text('path'))}; {printable(energy.text('method'))}.")
    return Section(
        "energy", title, about, [picture], [ReportTable("energy-parts", "Parts", table_columns(columns), rows)], notes
    )


def _reason(fields: Fields) -> str:
    return fields.text("reason", "the report does not say")


_TITLE = "Memory"
_SHOWN_SHARES = 50
_LONGEST_NAME = 30
_CHARACTERS = 45  # fit side by side into the picture on a phone


def memory_section(reader: CaptureReader, ops: CapturedOps) -> tuple[Section, list[DeviceMemory]]:
    """The section, and the figures that it is made of. Raises InvalidCapture for a damaged frame."""
    devices = memory_by_device(reader)
    about = [
        "Bytes of the program's storages that are alive at each record, exactly, from their lifetimes: those that came "
        "from outside count from their first use. What kernels allocate within a call, and what an allocator rounds up "
        "or keeps, is not in it."
    ]
    about += [
        f"{each.device}: at most {si(each.peak_bytes, 'B')} at record {each.peak_ordinal:,}, in "
        f"{each.peak_storages:,} storages; {si(each.held_peak_bytes, 'B')} if each is held until its release was "
        f"noticed; {si(each.end_bytes, 'B')} at the end."
        for each in devices
    ]
    if not devices:
        return Section("memory", _TITLE, about, [MissingPicture("memory", _TITLE, "the capture has no storages")]), []
    notes = [
        "A step of the picture stands for several records; the line is the most bytes at any of them."
        for each in devices[:1]
        if bool((each.least_bytes != each.most_bytes).any())
    ]
    lines = [_line(each) for each in devices]
    picture: Picture = StepPicture("memory", _TITLE, Axis("record"), Axis("alive", "B"), lines, _regions(reader, ops))
    return Section("memory", _TITLE, about, [picture], [_shares(devices)], notes), devices


def _line(memory: DeviceMemory) -> Line:
    """The steps at which the bytes change, and the last one, where the line ends."""
    bytes_alive = memory.most_bytes
    changes = np.concatenate([[True], bytes_alive[1:] != bytes_alive[:-1]])
    changes[-1] = True
    return Line(memory.device, memory.ordinals[changes].tolist(), bytes_alive[changes].tolist())


def _regions(reader: CaptureReader, ops: CapturedOps) -> list[Region]:
    """Outermost passes through scopes that have room for their name; where threads overlap, those that begin first."""
    found: list[Region] = []
    for each in ops.scope_passes:
        name = printable(scope_path(reader, each.scope), _LONGEST_NAME)
        roomy = (each.last - each.first) * _CHARACTERS > len(name) * reader.record_count
        if not each.depth and roomy and (not found or each.first > found[-1].last):
            found.append(Region(name, each.first, each.last))
    return found


def _shares(devices: list[DeviceMemory]) -> ReportTable:
    """What made the storages of each peak, the largest shares first."""
    rows = [
        TableRow(
            text_cell(device.device),
            text_cell(_maker(share)),
            count_cell(share.storages),
            figure_cell(float(share.bytes), "B", ""),
            figure_cell(share.bytes / device.peak_bytes if device.peak_bytes else None, "%", "the peak is 0 bytes"),
        )
        for device in devices
        for share in device.shares[:_SHOWN_SHARES]
    ]
    columns = table_columns(("device", "made by", "storages", "bytes", "of the peak"), texts=(0, 1))
    return ReportTable("peak", "What the peak is made of", columns, rows, 3)


def _maker(share: PeakShare) -> str:
    if share.outside:
        return "from outside the capture" + (f", first used by {share.op}" if share.op else "")
    return share.op or "not known"


_ABOUT = [
    "Captured: ops as they ran while the program was recorded, with the recorder's own work between them. Replayed: "
    "one replay under PyTorch's profiler, which adds its own work to each op; on devices, from when their work began. "
    "Isolated: not a run, but the median time of each call in a loop of its own, one after the other in capture order; "
    "nothing overlaps in it, and there are no gaps. Each has its own axis of time.",
    "Drag to zoom, double-click to see everything, click a bar for its call site. Where there is no room for each op, "
    "neighbours share a bar, which says how many they are. A long time without an op is narrower, in grey, and says "
    "how long it was.",
]


def timeline_section(
    figures: KernelFigures, ops: CapturedOps, site_of: np.ndarray, replayed: ReplayedTrace | None
) -> Section:
    """`site_of` has the number of each op's call site. Raises UsageError for a trace in which nothing was replayed."""
    names, notes = NameTable(), []
    captured = captured_lanes(ops, site_of, figures.reader, names)
    if captured and figures.clock == "device":
        notes.append(
            "In the captured lanes of devices a bar begins when the host issued the op, and is as long as the device "
            "took: the capture does not hold when the device began."
        )
    dropped = int(((ops.duration_ns < 0) & ((ops.device_ns < 0) | (ops.device == 0))).sum())
    if captured and dropped:
        notes.append(f"{dropped:,} ops have no captured time, and are not in the picture of the capture.")
    traced = [] if replayed is None else replayed_lanes(replayed, figures.reader, names)
    if replayed is not None and not replayed.names_its_capture:
        notes.append("The replay's trace does not say of which capture it is.")
    isolated: list[Lane] = []
    times = IsolatedTimes(figures.measured)
    if times:
        isolated, without = isolated_lanes(ops, site_of, figures.reader, names, times)
        if without:
            notes.append(f"{without:,} ops have no isolated time, and are not in the picture of isolated calls.")
    command = figures.command("run --device-profiling-mode=host-ops --device-profiling-output=replay.json.gz")
    parts = (
        ("timeline", "Timeline, captured", captured, figures.no_captured),
        (
            "timeline-replayed",
            "Timeline, replayed",
            traced,
            f"no trace of a replay was given. Record one with {command}, then add --replayed=replay.json.gz",
        ),
        ("timeline-isolated", "Timeline, isolated calls", isolated, figures.no_calls),
    )
    coloured = most_time((*captured, *traced, *isolated))
    pictures: list[Picture] = []
    for name, title, lanes, missing in parts:
        if not lanes:
            pictures.append(MissingPicture(name, title, missing))
            continue
        timeline = timeline_of(lanes, names)
        pictures.append(TimelinePicture(name, title, timeline, coloured))
        if timeline.lanes_left_out:
            notes.append(f"{title}: {timeline.lanes_left_out:,} more lanes of threads and streams are left out.")
    return Section("timeline", "Timeline", _ABOUT, pictures, [], notes)


def most_time(lanes: Sequence[Lane]) -> list[int]:
    """The names with most time in any picture, as many as there are colours."""
    taken: Counter[int] = Counter()
    for lane in lanes:
        if not lane.scopes:
            found, place = np.unique(lane.name, return_inverse=True)
            sums = np.bincount(place.reshape(-1), weights=lane.taken)
            taken.update(dict(zip(found.tolist(), sums.tolist(), strict=True)))
    return [name for name, total in taken.most_common(len(CATEGORIES)) if total > 0]


_COMPARED = {
    "digests": "digests",
    "host_reads": "host reads",
    "scalars": "scalars the program read",
    "structures": "ops' results by their shapes",
}


@dataclass(frozen=True)
class VerificationNote:
    """`source` is the file that says it, `command` what verifies, where nothing says it."""

    verified: bool
    text: str
    source: str = ""
    command: str = ""


def verification_notes(
    benchmarks: Sequence[tuple[str, Document]], runs: Sequence[Fields], command: str
) -> list[VerificationNote]:
    """Of each file that says anything; else the command that verifies. Raises UsageError for damaged files."""
    found = []
    for where, document in benchmarks:
        text = document["context"].get("verified")
        if isinstance(text, str):
            found.append(_note("not verified" not in text, text, where))
    found += [_note(*_verdict(row), row.where) for row in runs]
    if found:
        return found
    return [VerificationNote(False, "not verified: no result of a replay was given. This verifies it:", "", command)]


def _note(verified: bool, text: str, source: str) -> VerificationNote:
    return VerificationNote(verified, printable(text, LONGEST_TEXT), printable(source))


def _verdict(row: Fields) -> tuple[bool, str]:
    """Of what opreplay-run printed."""
    outcome, verification = row.text("outcome"), row.fields("verification")
    mode = verification.text("mode")
    devices = ", ".join(row.texts("devices")) or "no device"
    if outcome == "mismatched" and row.has("divergence"):
        first = row.fields("divergence")
        where = (
            f"first at ordinal {first.count('ordinal'):,} ({first.text('op')})"
            if first.has("ordinal")
            else "at the end"
        )
        return False, f"not verified: the replay on {devices} differs from the capture, {where}"
    if mode == "none":
        return False, f"not verified: {'; '.join(verification.texts('reasons')) or 'nothing was compared'}"
    if outcome != "ok":
        verdicts = row.fields("verdicts").content if row.has("verdicts") else {}
        counts = ", ".join(f"{count} {name}" for name, count in verdicts.items())
        return False, f"not verified: the replay on {devices} is {outcome}{counts and ': ' + counts}"
    compared = {name: verification.count(name) for name in _COMPARED}
    parts = [f"{count:,} {_COMPARED[name]}" for name, count in compared.items() if count]
    text = f"{mode}, on {devices}; compared: {', '.join(parts) or 'nothing'}"
    if row.has("nondeterministic") and (names := row.texts("nondeterministic")):
        text += f"; nondeterministic: {'; '.join(names)}"
    for name, what in (("unsupported", "records of work that cannot be replayed"), ("left_out", "records left out")):
        count = row.count(name) if name == "unsupported" else len(row.texts(name))
        text += f"; {count:,} {what}" if count else ""
    return bool(parts), text


_LONGEST_WARNING = 240


@dataclass(frozen=True)
class ReportInputs:
    """What a report is made of, besides the capture: documents with what to call them in errors."""

    benchmarks: list[tuple[str, Document]] = field(default_factory=list)
    baseline: tuple[str, Document] | None = None
    energy: Fields | None = None
    probes: list[ProbeRun] = field(default_factory=list)
    runs: list[Fields] = field(default_factory=list)
    replayed: ReplayedTrace | None = None
    comparison: Comparison | None = None


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page."""

    title: str
    figure: str
    about: str = ""


@dataclass(frozen=True)
class ReportContents:
    title: str
    verification: list[VerificationNote]
    findings: list[Finding]
    tiles: list[Tile]
    facts: list[tuple[str, str]]
    warnings: list[str]
    sections: list[Section]


def make_contents(reader: CaptureReader, inputs: ReportInputs) -> ReportContents:
    """Everything to say of a capture and its measurements. Raises InvalidCapture for a damaged capture and UsageError
    for measurements that are damaged, or do not belong together."""
    if inputs.baseline is not None and not inputs.benchmarks:
        raise UsageError("--baseline needs --benchmark=FILE: there is nothing to compare with it")
    measured = read_measurements(inputs.benchmarks, inputs.energy)
    comparison = None
    if inputs.baseline is not None:
        path, before = inputs.baseline
        rows = [row for _where, document in inputs.benchmarks for row in document["benchmarks"]]
        after = {**inputs.benchmarks[0][1], "benchmarks": rows}
        comparison = compare_with_baseline(path, before, after)
    ops = captured_ops(reader)
    sites, site_of = call_sites(ops)
    figures = KernelFigures(reader, sites, kernel_totals(ops), clock_of(ops), measured)
    kernels = Section(
        "kernels", "Kernels and call sites",
        [
            "A kernel is an operator overload. A call site is a signature of it in one scope: with the dtypes, sizes "
            "and strides it was called with. A kernel's name leads to its dearest call site."
        ],
        [],
        [kernel_table(figures), call_site_table(figures)],
    )  # fmt: skip
    memory, devices = memory_section(reader, ops)
    sections = [
        top_kernels(figures),
        kernels,
        *([probe_section(inputs.probes, figures)] if inputs.probes else []),
        captured_and_replayed(figures),
        *([] if comparison is None else [baseline_section(comparison)]),
        *([] if inputs.comparison is None else [comparison_section(inputs.comparison)]),
        roofline(figures),
        memory,
        timeline_section(figures, ops, site_of, inputs.replayed),
        energy_section(inputs.energy, figures),
    ]
    return ReportContents(
        printable(os.path.basename(reader.path), 80),
        verification_notes(inputs.benchmarks, inputs.runs, figures.command("run")),
        findings(figures, ops, devices),
        _tiles(figures, inputs, devices),
        [(name, printable(text, LONGEST_TEXT)) for name, text in summary_facts(reader) if text],
        _warnings(reader, inputs),
        sections,
    )


def _tiles(figures: KernelFigures, inputs: ReportInputs, devices: list[DeviceMemory]) -> list[Tile]:
    calls = sum(each.calls for each in figures.kernels)
    times = [figures.captured(each).total_ns for each in figures.kernels]
    known = [time for time in times if time is not None]
    captured = time_cell(sum(known) if known else None, figures.no_captured)
    whole = min(figures.measured.wholes, key=lambda each: bool(each.name), default=None)
    tiles = [
        Tile("calls", f"{calls:,}", f"of {counted(len(figures.kernels), 'kernel')}"),
        Tile("call sites", f"{len(figures.sites):,}", "signatures in scopes"),
        Tile(f"in ops during capture ({figures.clock or 'host'})", captured.text, captured.about),
    ]
    if whole is not None:
        cell = time_cell(whole.median_ns, whole.reasons.get("median", ""))
        title = "a scope, replayed" if whole.name else "a replay"
        tiles.append(Tile(title, cell.text, f"median; {whole.name or 'the whole capture'}"))
    else:
        tiles.append(Tile("a replay", "not measured", "no --benchmark of whole replays"))
    if inputs.energy is not None:
        comparison = inputs.energy.fields("comparison")
        joules = figure_cell(comparison.number("whole_joules_per_run"), "J", "see the section on energy")
        tiles.append(Tile("energy of a replay", joules.text, joules.about))
    for each in devices[:4]:
        where, peak = printable(each.device, 40), si(each.peak_bytes, "B")
        tiles.append(Tile(f"at most alive, {where}", peak, f"at record {each.peak_ordinal:,}"))
    return tiles


def _warnings(reader: CaptureReader, inputs: ReportInputs) -> list[str]:
    found = [] if reader.complete else [f"The capture was never closed: {reader.incomplete_reason}."]
    found += reader.warnings
    if reader.summary.unsupported:
        count = sum(reader.summary.unsupported.values())
        found.append(f"{count:,} parts of the work are recorded as unsupported, and are in none of the figures here.")
    for _where, document in inputs.benchmarks:
        warnings = document["context"].get("warnings")
        found += [each for each in warnings if isinstance(each, str)] if isinstance(warnings, list) else []
        for row in document["benchmarks"]:
            warnings = row.get("warnings") if row.get("repetition_index") == 0 else None
            said = [each for each in warnings if isinstance(each, str)] if isinstance(warnings, list) else []
            found += [f"{row['name']}: {each}" for each in said]
    return [printable(each, _LONGEST_WARNING) for each in dict.fromkeys(found)]
