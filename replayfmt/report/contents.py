"""What a report says: everything on its page, as plain values, before any library sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from replayfmt.benchmark.comparison.baseline import Document, compare_with_baseline
from replayfmt.dump.definitions import summary_facts
from replayfmt.errors import UsageError
from replayfmt.format.memory import DeviceMemory
from replayfmt.format.printable import counted, printable
from replayfmt.format.reader import CaptureReader

from .call_sites import call_sites, clock_of, kernel_totals
from .documents import Fields
from .kernel_sections import KernelFigures, Section, call_site_table, kernel_table, roofline, top_kernels
from .measured import read_measurements
from .measurement_sections import baseline_section, captured_and_replayed, energy_section
from .memory_section import memory_section
from .ops import captured_ops
from .probe_results import ProbeRun
from .probe_section import probe_section
from .replayed_trace import ReplayedTrace
from .tables import LONGEST_TEXT, figure_cell, si
from .timeline_section import timeline_section
from .verification import VerificationNote, verification_notes

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
        roofline(figures),
        memory,
        timeline_section(figures, ops, site_of, inputs.replayed),
        energy_section(inputs.energy, figures),
    ]
    return ReportContents(
        printable(os.path.basename(reader.path), 80),
        verification_notes(inputs.benchmarks, inputs.runs, figures),
        [*_tiles(figures, inputs), *_memory_tiles(devices)],
        [(name, printable(text, LONGEST_TEXT)) for name, text in summary_facts(reader) if text],
        _warnings(reader, inputs),
        sections,
    )


def _tiles(figures: KernelFigures, inputs: ReportInputs) -> list[Tile]:
    calls = sum(each.calls for each in figures.kernels)
    times = [figures.captured(each).total_ns for each in figures.kernels]
    known = [time for time in times if time is not None]
    captured = figure_cell(sum(known) / 1e9 if known else None, "s", figures.no_captured)
    whole = min(figures.measured.wholes, key=lambda each: bool(each.name), default=None)
    tiles = [
        Tile("calls", f"{calls:,}", f"of {counted(len(figures.kernels), 'kernel')}"),
        Tile("call sites", f"{len(figures.sites):,}", "signatures in scopes"),
        Tile(f"in ops during capture ({figures.clock or 'host'})", captured.text, captured.about),
    ]
    if whole is not None:
        cell = figure_cell(whole.median_ns and whole.median_ns / 1e9, "s", whole.reasons.get("median", ""))
        title = "a scope, replayed" if whole.name else "a replay"
        tiles.append(Tile(title, cell.text, f"median; {whole.name or 'the whole capture'}"))
    else:
        tiles.append(Tile("a replay", "not measured", "no --benchmark of whole replays"))
    if inputs.energy is not None:
        comparison = inputs.energy.fields("comparison")
        joules = figure_cell(comparison.number("whole_joules_per_run"), "J", "see the section on energy")
        tiles.append(Tile("energy of a replay", joules.text, joules.about))
    return tiles


def _memory_tiles(devices: list[DeviceMemory]) -> list[Tile]:
    return [
        Tile(
            f"at most alive, {printable(each.device, 40)}", si(each.peak_bytes, "B"), f"at record {each.peak_ordinal:,}"
        )
        for each in devices[:4]
    ]


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
