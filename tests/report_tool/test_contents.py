"""What a report says: figures add up to those of the files they are from, and what nobody measured has a reason."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from replayfmt.benchmark.baseline import read_baseline
from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.memory import memory_by_device
from replayfmt.format.reader import open_capture
from replayfmt.report.contents import ReportContents, ReportInputs, make_contents
from replayfmt.report.kernel_sections import Section
from replayfmt.report.measurements import read_benchmark, read_energy
from replayfmt.report.ops import call_sites, captured_ops, kernel_totals
from replayfmt.report.pictures import (
    BarPicture,
    MissingPicture,
    ReportTable,
    ScatterPicture,
    StepPicture,
    TableRow,
    TimelinePicture,
)
from replayfmt.report.timelines import Bars, ReplayedTrace, merged

from .conftest import Measured, energy_of, tool

ROOT = Path(__file__).parents[2]


def contents_of(
    measured: Measured, *benchmarks: Path, energy: bool = False, baseline: bool = False, trace: Path | None = None
) -> ReportContents:
    with open_capture(measured.capture) as reader:
        return make_contents(
            reader,
            ReportInputs(
                [(f"--benchmark={path}", read_benchmark(path, reader)) for path in benchmarks],
                (str(measured.earlier), read_baseline(measured.earlier)) if baseline else None,
                read_energy(measured.energy, reader) if energy else None,
                replayed=None if trace is None else ReplayedTrace(str(trace), reader),
            ),
        )


def section(contents: ReportContents, name: str) -> Section:
    return next(each for each in contents.sections if each.name == name)


def table(contents: ReportContents, name: str) -> ReportTable:
    return next(each for one in contents.sections for each in one.tables if each.name == name)


def column(shown: ReportTable, title: str, of: str | None = None) -> list[object]:
    """The figures of a column; of the rows whose text has `of`."""
    place = next(i for i, each in enumerate(shown.columns) if each.title == title)
    rows: list[TableRow] = [row for row in shown.rows if of is None or any(of in cell.text for cell in row.cells)]
    return [row.cells[place].sort for row in rows]


@pytest.fixture(scope="module")
def everything(measured: Measured) -> ReportContents:
    return contents_of(measured, measured.whole, measured.per_op, energy=True, baseline=True, trace=measured.trace)


@pytest.mark.slow
def test_calls_and_times_add_up_to_those_of_the_records(measured: Measured) -> None:
    with open_capture(measured.capture) as reader:
        records = [each for each in reader.records() if each.kind is RecordKind.op]
        ops = captured_ops(reader)
        sites, site_of = call_sites(ops)
        totals = kernel_totals(ops)
        assert sum(site.calls for site in sites) == sum(each.calls for each in totals) == len(ops) == len(records)
        host = sum(record.duration_ns or 0 for record in records)
        assert sum(site.host.total_ns or 0 for site in sites) == sum(each.host.total_ns or 0 for each in totals) == host
        assert all(site.device.total_ns is None for site in sites)
        for record, number in zip(records, site_of.tolist(), strict=True):
            site = sites[number - 1]
            assert (site.number, site.kernel, site.scope) == (number, record.signature.kernel, record.scope)
            assert site.first <= record.ordinal
        begins = [each for each in reader.records() if each.kind is RecordKind.scope_begin]
        assert [(each.scope, each.start_ns) for each in begins] == [
            (each.scope, each.start_ns) for each in ops.scope_passes
        ]


@pytest.mark.slow
def test_measured_calls_are_those_of_the_benchmark_with_the_numbers_in_their_signatures_as_types(
    everything: ReportContents, measured: Measured
) -> None:
    rows = json.loads(measured.per_op.read_text())["benchmarks"]
    # Three factors, three rows of the benchmark, one call site of three calls.
    products = [row for row in rows if row["op"] == "aten::mul.Tensor"]
    assert len(products) == 3
    kernels, sites = table(everything, "kernels"), table(everything, "call-sites")
    for shown in (kernels, sites):
        (total,) = column(shown, "isolated, all calls", "aten::mul.Tensor")
        assert total == pytest.approx(sum(row["estimated_us"] for row in products) / 1e6)
        (moved,) = column(shown, "bytes, a call", "aten::mul.Tensor")
        assert moved == products[0]["bytes_read"] + products[0]["bytes_written"]
    total = sum(figure for figure in column(kernels, "isolated, all calls") if isinstance(figure, float))
    assert total == pytest.approx(sum(row["estimated_us"] for row in rows) / 1e6)
    assert column(sites, "FLOP, a call", "aten::mm") == [2 * 16 * 32 * 8]
    assert column(sites, "FLOP, a call", "aten::relu") == [""]


def test_joules_are_those_of_the_energy_report_and_what_it_could_not_measure_has_its_reason(
    everything: ReportContents,
) -> None:
    kernels = table(everything, "kernels")
    (calls,), (joules,) = (column(kernels, title, "aten::mul.Tensor") for title in ("calls", "energy, all calls"))
    assert joules == calls == 3
    place = [each.title for each in kernels.columns].index("energy, all calls")
    (cell,) = (row.cells[place] for row in kernels.rows if row.cells[0].text.startswith("aten::mm"))
    assert (cell.text, cell.about) == ("not measured", "too few samples")
    parts = table(everything, "energy-parts")
    assert [row.cells[2].text for row in parts.rows] == ["not measured", "100 J"]
    assert parts.rows[0].cells[2].about == "the log ends before"
    assert "0.600 ×" in section(everything, "energy").about[0]


def test_the_joules_of_these_tests_are_a_report_as_the_schema_has_it(measured: Measured) -> None:
    schema = json.loads((ROOT / "docs/energy.schema.json").read_text())
    jsonschema.validate(energy_of(json.loads(measured.per_op.read_text())), schema)


def test_a_kernel_of_which_not_all_calls_were_measured_shows_what_is_known_with_its_share(
    measured: Measured, tmp_path: Path
) -> None:
    def leave_out(document: dict[str, object], name: str, rows: str) -> None:
        listed = document[rows]
        assert isinstance(listed, list)
        document[rows] = [row for row in listed if not row[name].removeprefix("BM_op/").startswith(_ONE_OF_ADD)]

    partly = edited(measured.per_op, tmp_path / "partly.json", lambda each: leave_out(each, "name", "benchmarks"))
    energy = edited(measured.energy, tmp_path / "energy.json", lambda each: leave_out(each, "name", "kernels"))
    with open_capture(measured.capture) as reader:
        inputs = ReportInputs([("x", read_benchmark(partly, reader))], energy=read_energy(energy, reader))
        shown = make_contents(reader, inputs)
    kernels = table(shown, "kernels")
    (row,) = (each for each in kernels.rows if each.cells[0].text.startswith("aten::add.Tensor"))
    titles = [each.title for each in kernels.columns]
    for title in ("isolated, all calls", "energy, all calls"):
        cell = row.cells[titles.index(title)]
        assert cell.text.endswith(" (93.3% of the calls)"), title
        assert cell.about == "of 42 of 45 calls (93.3%); the others: the benchmark has no row of these calls"
    times = [row["estimated_us"] for row in json.loads(partly.read_text())["benchmarks"] if "add.Tensor" in row["op"]]
    assert row.cells[titles.index("isolated, all calls")].sort == pytest.approx(sum(times) / 1e6)
    for title in ("isolated, a call", "bytes, a call", "energy, a call"):
        assert row.cells[titles.index(title)].text != "not measured", title
    top = section(shown, "top")
    for picture in top.pictures:
        if picture.name in ("top-replayed", "top-energy"):
            assert isinstance(picture, BarPicture) and "aten::add.Tensor" in picture.labels
    assert any("isolated times and bytes are those of 93.3% or more of their calls" in each for each in top.notes)
    assert any("3 ops have no isolated time" in each for each in section(shown, "timeline").notes)
    whole = contents_of(measured, measured.whole, partly)
    (said,) = section(whole, "replay").notes
    assert said.startswith("Sum of isolated calls: of ")
    assert said.endswith("%); not all calls of 1 kernel have an isolated time.")


def test_one_call_that_could_not_be_measured_hides_none_of_the_others(measured: Measured, tmp_path: Path) -> None:
    """As an op whose clock stood still, in a benchmark of ops, and as a part of a row by kernel."""

    def unmeasurable(document: dict[str, object]) -> None:
        rows = document["benchmarks"]
        assert isinstance(rows, list)
        row = next(row for row in rows if row["name"].removeprefix("BM_op/").startswith(_ONE_OF_ADD))
        kept = {key: row[key] for key in ("name", "op", "run_type", "count")}
        row.clear()
        row |= kept | {"error_occurred": True, "error_message": "unmeasurable: the clock did not advance"}

    partly = edited(measured.per_op, tmp_path / "one.json", unmeasurable)
    shown = table(contents_of(measured, measured.whole, partly), "kernels")
    (row,) = (each for each in shown.rows if each.cells[0].text.startswith("aten::add.Tensor"))
    cell = row.cells[[each.title for each in shown.columns].index("isolated, all calls")]
    assert cell.text.endswith(" (93.3% of the calls)") and cell.about.endswith(
        "unmeasurable: the clock did not advance"
    )


_ONE_OF_ADD = "aten::add.Tensor(float32[7], "


def test_repetitions_of_a_replay_are_one_sample_in_the_page(measured: Measured, tmp_path: Path) -> None:
    def repeat(document: dict[str, list[dict[str, object]]]) -> None:
        (row,) = document["benchmarks"]
        document["benchmarks"] = [
            row | {"repetition_index": place, "samples": {"real_time": [time] * 6}, "median_real_time": time}
            for place, time in enumerate((100.0, 300.0, 300.0))
        ]

    shown = contents_of(measured, edited(measured.whole, tmp_path / "repeated.json", repeat))
    assert column(table(shown, "regions"), "replayed, median") == [pytest.approx(300e-9)]
    assert column(table(shown, "regions"), "at least") == [pytest.approx(100e-9)]


def test_with_everything_given_every_picture_is_drawn(everything: ReportContents) -> None:
    pictures = {each.name: each for one in everything.sections for each in one.pictures}
    assert not [each for each in pictures.values() if isinstance(each, MissingPicture)]
    kinds = {"roofline": ScatterPicture, "memory": StepPicture, "timeline": TimelinePicture, "replay": BarPicture}
    for name, kind in kinds.items():
        assert isinstance(pictures[name], kind)
    roofline, replay = pictures["roofline"], pictures["replay"]
    assert isinstance(roofline, ScatterPicture) and isinstance(replay, BarPicture)
    assert [line.y for line in roofline.lines] == [[pytest.approx(roofline.lines[0].x[0] * 1e11), 1e12, 1e12]]
    assert [each.name for each in replay.series] == ["captured", "replayed, median", "isolated calls, summed"]
    assert all(note.verified and "bitwise" in note.text for note in everything.verification)


def test_the_line_of_memory_is_that_of_the_records_and_the_scopes_that_it_passes_are_marked(measured: Measured) -> None:
    with open_capture(measured.capture) as reader:
        (memory,) = memory_by_device(reader)
        records = list(reader.records())
        (section,) = (each for each in make_contents(reader, ReportInputs()).sections if each.name == "memory")
    (picture,) = section.pictures
    assert isinstance(picture, StepPicture)
    ((x, y),) = ((line.x, line.y) for line in picture.lines)
    alive = [y[bisect_right(x, ordinal) - 1] for ordinal in memory.ordinals.tolist()]
    assert alive == memory.most_bytes.tolist() and x[-1] == memory.ordinals[-1]
    assert [each.name for each in picture.regions] == ["step"] * 3
    for region in picture.regions:
        first, last = records[int(region.first)], records[int(region.last)]
        assert (first.kind, last.kind) == (RecordKind.scope_begin, RecordKind.scope_end)
        assert first.scope == last.scope


def test_slower_than_the_baseline_is_said_of_each_row(everything: ReportContents) -> None:
    rows = table(everything, "baseline-rows").rows
    ratios = [row.cells[3].sort for row in rows if isinstance(row.cells[3].sort, float)]
    assert ratios and all(ratio == pytest.approx(10) for ratio in ratios)
    assert {row.cells[6].text for row in rows} <= {"slower", "not known", "too noisy to tell"}
    assert any("BM_replay" in note for note in section(everything, "baseline").notes)


def test_what_nobody_measured_is_not_measured_and_says_what_measures_it(measured: Measured) -> None:
    bare = contents_of(measured)
    reasons = {
        each.name: each.reason for one in bare.sections for each in one.pictures if isinstance(each, MissingPicture)
    }
    assert set(reasons) == {"top-replayed", "top-bytes", "top-energy", "replay", "roofline", "energy"} | {
        "timeline-replayed",
        "timeline-isolated",
    }
    assert all("opreplay-" in reason for reason in reasons.values())
    (note,) = bare.verification
    assert not note.verified and note.command.startswith("opreplay-run ")
    kernels = table(bare, "kernels")
    assert [each.title for each in kernels.columns] == ["kernel", "calls", "signatures", "captured, host", "share"]
    assert any("FLOP/s" in note and "--per-op" in note for note in kernels.notes)
    assert any("energy" in note and "--energy=FILE" in note for note in kernels.notes)


@pytest.mark.slow
def test_a_benchmark_by_kernel_has_times_of_kernels_and_none_of_call_sites(measured: Measured, tmp_path: Path) -> None:
    by_kernel = tmp_path / "by_kernel.json"
    assert tool("benchmark", "--per-op", "--group-by=kernel", "--benchmark-min-time=6x",
                f"--benchmark-out={by_kernel}", measured.capture) == 0  # fmt: skip
    shown = contents_of(measured, by_kernel)
    rows = {row["name"]: row for row in json.loads(by_kernel.read_text())["benchmarks"]}
    (total,) = column(table(shown, "kernels"), "isolated, all calls", "aten::mm")
    assert total == pytest.approx(rows["BM_op/kernel:aten::mm.default"]["estimated_us"] / 1e6)
    assert not any(each.title.startswith("isolated") for each in table(shown, "call-sites").columns)
    (roofline,) = section(shown, "roofline").pictures
    assert isinstance(roofline, MissingPicture) and "is summed by kernel (--group-by=kernel)" in roofline.reason


def test_neighbours_share_a_bar_that_keeps_their_number_and_their_time() -> None:
    rng = np.random.default_rng(1)
    lane = np.repeat([0, 1], 5000)
    start = np.sort(rng.integers(0, 10**9, 10000).reshape(2, 5000), axis=1).reshape(-1)
    busy = rng.integers(1, 10**5, 10000)
    ordinal = np.arange(10000)
    bars = Bars(lane, start, start + busy, busy, np.ones(10000, np.int64), ordinal % 7, ordinal, ordinal)
    assert merged(bars, 10000) is bars
    fewer = merged(bars, 500)
    assert 100 < len(fewer) <= 500
    assert fewer.count.sum() == 10000 and fewer.busy.sum() == busy.sum()
    assert set(fewer.lane.tolist()) == {0, 1}
    for place, number in enumerate(fewer.ordinal.tolist()):
        assert fewer.start[place] <= start[number] and start[number] + busy[number] <= fewer.end[place]
        within = (lane == fewer.lane[place]) & (start >= fewer.start[place]) & (start <= start[number])
        assert busy[number] >= busy[within].max()


def edited(path: Path, to: Path, change: object) -> Path:
    assert callable(change)
    document = json.loads(path.read_text())
    change(document)
    to.write_text(json.dumps(document))
    return to


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["context"].update(capture_session="another"), "was measured on another capture .session another."),
        (lambda d: d["context"].update(json_schema_version=2), "has the schema version 2, not 1"),
        (lambda d: d.update(comparisons=[]), "is a comparison of kernels"),
        (lambda d: d["benchmarks"][0].update(count="three"), r"benchmarks\[0\]: count: expected a whole number"),
        (lambda d: d["benchmarks"][0].update(count=-1), r"count: expected a whole number from 0 to .*, got -1"),
        (lambda d: d["benchmarks"][0].update(flops="many"), "flops: expected a number of at most 1e.30 or null"),
        (lambda d: d["benchmarks"][0].update(flops=10**400), "flops: expected a number of at most 1e.30 or null"),
        (lambda d: d["benchmarks"][0].update(name="BM_op/((("), "its name is not a signature"),
        (lambda d: d.clear(), "has no context"),
    ],
)  # fmt: skip
def test_a_benchmark_that_is_not_one_of_this_capture_is_one_error(
    measured: Measured, tmp_path: Path, change: object, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        contents_of(measured, edited(measured.per_op, tmp_path / "edited.json", change))


@pytest.mark.parametrize("name", ["estimated_us", "estimated_us_low", "median_real_time", "captured_time", "samples"])
@pytest.mark.parametrize("value", [-1, "x", 1e308])
def test_a_time_that_is_none_is_one_error_that_names_it(
    measured: Measured, tmp_path: Path, name: str, value: object
) -> None:
    file = measured.per_op if name.startswith("estimated") else measured.whole
    new = {"real_time": [1.0, value]} if name == "samples" else value
    path = edited(file, tmp_path / "edited.json", lambda document: document["benchmarks"][0].update({name: new}))
    named = "real_time.1." if name == "samples" else name
    with pytest.raises(UsageError, match=f"{named}: expected a .*, got .*; the file is damaged"):
        contents_of(measured, path)


def _leaves(content: object) -> list[tuple[dict[str, object], str]]:
    """Where the values of a document are; of a list's items, the first."""
    found = []
    for key, value in content.items() if isinstance(content, dict) else ():
        found.append((content, key))
        found += _leaves(value[0] if isinstance(value, list) and value else value)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("which", ["whole", "per_op", "energy"])
def test_a_document_with_anything_in_the_place_of_anything_is_read_or_refused(
    measured: Measured, tmp_path: Path, which: str
) -> None:
    document = json.loads(getattr(measured, which).read_text())
    for key in ("benchmarks", "kernels"):
        document[key] = document.get(key, [])[:1]
    refused = 0
    for place, key in _leaves(document):
        before = place[key]
        for value in (-1, 10**400, 1e308, 5e-324, "x", [], {}, [[]], True, float("nan")):
            place[key] = value
            changed = tmp_path / "changed.json"
            changed.write_text(json.dumps(document))
            given = dict(energy=True) if which == "energy" else {}
            files = [] if which == "energy" else [changed]
            try:
                contents_of(replace(measured, energy=changed), *files, **given, baseline=which == "per_op")
            except UsageError as error:
                assert str(error).startswith(("--benchmark=", "--baseline=", "--energy=")) or "changed.json" in str(
                    error
                )
                refused += 1
        place[key] = before
    assert refused > 20


def test_a_benchmark_given_twice_is_refused(measured: Measured) -> None:
    for path in (measured.whole, measured.per_op):
        with pytest.raises(UsageError, match="is in several of the files"):
            contents_of(measured, path, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["context"].update(capture_session=None), "was measured on another capture"),
        (lambda d: d.update(schema_version=9), "has the schema version 9"),
        (lambda d: d.pop("isolated_kernels"), "is not an energy report"),
        (lambda d: d["kernels"].append(3), r"kernels\[\d+\]: expected an object, got"),
        (lambda d: d["kernels"][0].update(joules_per_call=[1]), "joules_per_call: expected a number of at most"),
        (lambda d: d.pop("comparison"), "comparison: expected an object, got nothing"),
    ],
)
def test_an_energy_report_that_is_not_one_of_this_capture_is_one_error(
    measured: Measured, tmp_path: Path, change: object, words: str
) -> None:
    path = edited(measured.energy, tmp_path / "edited.json", change)
    with open_capture(measured.capture) as reader, pytest.raises(UsageError, match=words):
        make_contents(reader, ReportInputs([], None, read_energy(path, reader)))


def test_no_text_of_a_report_says_that_a_missing_figure_is_0(measured: Measured) -> None:
    shown = contents_of(measured, measured.whole)
    cells = [cell for one in shown.sections for each in one.tables for row in each.rows for cell in row.cells]
    assert not [cell for cell in cells if re.fullmatch(r"0 (s|J|W|FLOP|FLOP/s|B/s)", cell.text)]
