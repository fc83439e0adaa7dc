"""opreplay-import as people run it: its flags, its report, its exit codes; and its captures in the other tools."""

from __future__ import annotations

import gzip
import json
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest
from in_process import Tools

import replayfmt
from replayfmt.errors import UsageError
from replayfmt.importers.common.json_stream import JsonStream
from replayfmt.importers.kineto.events import TraceEvents

from .traces import ADD, H100, MM, SHARED, annotation, kernel, launch, op, tensor, trace

EVENTS = [
    annotation("ProfilerStep#0", 0, 100),
    op("aten::mm", 10, 10, MM),
    op("aten::mm", 30, 20, MM),
    op("aten::add_", 60, 10, ADD),
    op("aten::gelu", 80, 5, [tensor("float", 4), ("", [], [], "")]),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return trace(tmp_path / "step.json", EVENTS)


def test_a_trace_becomes_a_capture_that_replays(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    code, printed, err = tools("import", source, "-o", out)
    assert code == 0 and err == f"{out}: 4 calls\n"
    lines = printed.splitlines()
    assert lines[0] == "source        step.json (kineto)" and lines[1].startswith("exact         3 calls, 2 distinct: ")
    assumed = "assumed       aten::gelu, 1 time: approximate='none': the trace drops strings; the schema's default"
    assert assumed in lines
    assert "found         4 calls: operators of the JIT registry" in lines
    code, printed, _err = tools("run", out)
    assert code == 0 and "replayed: 4 ops of 3 kernels" in printed and "not verified: the content of" in printed
    code, printed, _err = tools("dump", out, "--jq", 'select(.kind=="op") | [.op, .duration_ns, .annotation.import]')
    assert printed.splitlines()[0] == '["aten::mm",10000,"exact"]'


@pytest.mark.slow
def test_captured_times_stand_beside_replayed_ones(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    tools("import", source, "-o", out)
    code, printed, _err = tools("benchmark", out, "--benchmark-min-time=2x", "--benchmark-format=json")
    rows = json.loads(printed)["benchmarks"]
    assert code == 0 and rows[0]["captured_time"] == pytest.approx(85_000, rel=0.3)
    tools("import", source, "-o", out, "--force", "--unique")
    code, printed, _err = tools("benchmark", out, "--per-op", "--benchmark-min-time=2x", "--benchmark-format=json")
    row = next(row for row in json.loads(printed)["benchmarks"] if "aten::mm" in row["name"])
    assert code == 0 and row["count"] == 2 and row["captured_us"] == pytest.approx(15.0)


def test_the_report_is_written_as_json_lines(tools: Tools, source: Path, tmp_path: Path) -> None:
    rows_file = tmp_path / "report.jsonl"
    _code, printed, _err = tools(
        "import", source, "-o", tmp_path / "a.opreplay", "--report", rows_file, "--format=jsonl"
    )
    assert printed == rows_file.read_text()
    rows = [json.loads(line) for line in printed.splitlines()]
    assert rows[0]["kind"] == "import" and rows[0]["unique"] == {"exact": 2, "inferred": 1, "incomplete": 0}
    assert rows[1]["op"] == "aten::mm" and rows[1]["calls"] == 2 and rows[1]["host_ns"] == 30_000
    code, _printed, err = tools("import", source, "-o", tmp_path / "b.opreplay", "--report", rows_file)
    assert code == 1 and "exists already" in err and not (tmp_path / "b.opreplay").exists()


def test_where_the_report_cannot_be_nothing_is_imported(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    for place, words in (("missing/report.jsonl", "there is no directory"), (".", "is a directory")):
        code, _printed, err = tools("import", source, "-o", out, "--report", tmp_path / place)
        assert code == 1 and words in err and not out.exists()


def test_unique_and_level_are_passed_on(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    assert tools("import", source, "-o", out, "--unique", "--level=root").code == 0
    _code, printed, _err = tools("dump", out, "--jq", 'select(.kind=="op") | [.op, .annotation.count]')
    assert printed.splitlines()[0] == '["aten::mm",2]'
    with replayfmt.open(out) as capture:
        assert capture.session.policies["import_level"] == "root" and capture.session.policies["import_unique"] is True


def test_an_existing_capture_is_kept_without_force(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    out.write_text("mine")
    code, _printed, err = tools("import", source, "-o", out)
    assert code == 1 and "--force" in err and out.read_text() == "mine"
    assert tools("import", source, "-o", out, "--force").code == 0


def test_the_trace_itself_is_never_replaced(tools: Tools, source: Path) -> None:
    before = source.read_bytes()
    code, _printed, err = tools("import", source, "-o", source, "--force")
    assert code == 2 and "the trace's place" in err and source.read_bytes() == before


def test_the_report_replaces_neither_the_trace_nor_the_capture(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    for place in (source, out):
        code, _printed, err = tools("import", source, "-o", out, "--report", place, "--force")
        assert code == 2 and "must be different files" in err and not out.exists() and source.exists()


def test_progress_is_shown_on_a_terminal_alone(
    tools: Tools, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _code, _printed, err = tools("import", source, "-o", tmp_path / "a.opreplay")
    assert "reading" not in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _code, _printed, err = tools("import", source, "-o", tmp_path / "b.opreplay")
    assert "reading" in err


def test_a_damaged_trace_is_imported_as_far_as_it_goes_and_says_where_it_ended(tools: Tools, tmp_path: Path) -> None:
    text = trace(tmp_path / "step.json", EVENTS).read_text()
    cut = tmp_path / "cut.json"
    cut.write_text(text[: text.index("aten::add_")])
    code, printed, err = tools("import", cut, "-o", tmp_path / "out.opreplay")
    assert code == 0 and "exact         2 calls," in printed
    assert "the file ends within an entry" in err and "byte " in err


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", "DATA_LOSS"),
        (b"hello", "DATA_LOSS"),
        (b'{"a": 1}', "DATA_LOSS"),
        (b"[]", "DATA_LOSS"),
        (b"\x1f\x8bgarbage", "DATA_LOSS"),
        (b'{"traceEvents": []}', "DATA_LOSS"),
        (b'{"traceEvents": 3}', "DATA_LOSS"),
        (b'{"nodes": 3}', "DATA_LOSS"),
    ],
)
def test_what_is_no_trace_is_one_line_and_exit_code_3(
    content: bytes, status: str, tools: Tools, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    code, _printed, err = tools("import", path, "-o", tmp_path / "out.opreplay")
    assert code == 3 and err.startswith(f"{status}: ") and "Traceback" not in err
    assert not (tmp_path / "out.opreplay").exists()


def test_a_missing_trace_is_exit_code_3(tools: Tools, tmp_path: Path) -> None:
    code, _printed, err = tools("import", tmp_path / "nowhere.json", "-o", tmp_path / "out.opreplay")
    assert code == 3 and err.startswith("NOT_FOUND: ")


def test_wrong_flags_are_exit_code_2(tools: Tools, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    assert tools("import", source).code == 2
    assert tools("import", source, "-o", out, "--level=middle").code == 2
    code, _printed, err = tools("import", source, "-o", out, "--op-library=mylib")
    assert code == 2 and "NAMESPACE=MODULE" in err
    with pytest.raises(UsageError, match="expected one of auto"):
        replayfmt.import_trace(source, out, kind="perfetto")  # type: ignore[arg-type]


def test_from_overrides_what_the_content_says(tools: Tools, source: Path, tmp_path: Path) -> None:
    assert tools("import", source, "-o", tmp_path / "a.opreplay", "--from=kineto").code == 0
    assert tools("import", source, "-o", tmp_path / "b.opreplay", "--from=execution-trace").code == 3


def test_op_library_and_allow_import_let_an_operator_be_found(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"tool_library_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        import torch
        library = torch.library.Library("import_tool_tests", "FRAGMENT")
        if not hasattr(torch.ops.import_tool_tests, "halve"):
            library.define("halve(Tensor x) -> Tensor")
            library.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    source = trace(tmp_path / "t.json", [op("import_tool_tests::halve", 10, 10, [tensor("float", 4)])])
    out = tmp_path / "out.opreplay"
    _code, printed, err = tools("import", source, "-o", out)
    assert "1 calls are unsupported records" in err and "no_schema" in printed
    assert name not in sys.modules
    code, printed, err = tools("import", source, "-o", out, "--force", f"--op-library=import_tool_tests={name}")
    assert code == 0 and "exact         1 call," in printed and "unsupported" not in err
    code, printed, _err = tools("run", out, f"--op-library=import_tool_tests={name}")
    assert code == 0 and "replayed: 1 op " in printed
    from replayfmt.pytorch import op_libraries

    op_libraries._registered.pop("import_tool_tests")
    monkeypatch.setitem(op_libraries.KNOWN_LIBRARIES, "import_tool_tests", (name,))
    assert tools("import", source, "-o", out, "--force", f"--allow-import={name}").code == 0


def test_portable_rewriting_puts_common_operators_in_the_place_of_a_devices_own(tools: Tools, tmp_path: Path) -> None:
    weights = [tensor("float", 1, 3, 8, 8), tensor("float", 4, 3, 3, 3), ("", [], [], "")]
    lists = [("ScalarList", [], [], text) for text in ("[1, 1]", "[1, 1]", "[1, 1]")]
    rest = [("Scalar", [], [], text) for text in ("1", "False", "False")]
    events = [op("aten::miopen_convolution", 10, 10, [*weights, *lists, *rest]), launch(1, 12), kernel(1, 100, 5)]
    source = trace(tmp_path / "t.json", events, deviceProperties=[H100])
    out = tmp_path / "out.opreplay"
    assert tools("import", source, "-o", out).code == 0
    assert tools("run", out, "--device=cpu").code == 1
    code, printed, _err = tools("import", source, "-o", out, "--force", "--rewrite=portable")
    assert code == 0 and "rewritten: aten::miopen_convolution by aten::convolution" in printed
    assert tools("run", out, "--device=cpu").code == 0


def test_every_part_of_a_rewritten_call_has_the_count_of_the_calls_it_stands_for(tools: Tools, tmp_path: Path) -> None:
    taken = [tensor("float", 1, 3, 8, 8), tensor("float", 4, 3, 3, 3), ("", [], [], "")]
    taken += [("ScalarList", [], [], text) for text in ("[1, 1]", "[1, 1]", "[1, 1]")] + [("Scalar", [], [], "1")]
    events = []
    for call in (1, 2, 3):
        events.append(op("aten::miopen_convolution_relu", 100 * call, 10, taken))
        events += [launch(call, 100 * call + 2), kernel(call, 1000 + 100 * call, 5)]
    source, out = trace(tmp_path / "t.json", events, deviceProperties=[H100]), tmp_path / "out.opreplay"
    assert tools("import", source, "-o", out, "--unique", "--rewrite=portable").code == 0
    with replayfmt.open(out) as capture:
        parts = [op.record for op in capture.ops]
        assert len(parts) > 1, "a convolution and what follows it"
        assert [part.calls for part in parts] == [3] * len(parts)
    code, printed, _err = tools(
        "benchmark", "--per-op", out, "--device=cpu", "--benchmark-format=json", "--benchmark-min-time=1x"
    )
    assert code == 0 and [row["count"] for row in json.loads(printed)["benchmarks"]] == [3] * len(parts)


@pytest.mark.slow
def test_a_large_trace_is_read_with_memory_for_a_part_of_it(tmp_path: Path) -> None:
    line = json.dumps(op("aten::mm", 10, 5, MM, external=1))
    path = tmp_path / "large.json.gz"
    count = 40_000
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        for index in range(count):
            file.write(line.replace('"ts": 10', f'"ts": {index * 10}') + ",\n")
        file.write("{}]}")
    tracemalloc.start()
    try:
        events = TraceEvents().read(JsonStream.open(str(path)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text_bytes = count * len(line)
    assert len(events.ops.start) == count and len(events.kinds) == 1
    assert text_bytes >= 8 << 20 and peak_bytes < text_bytes


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the traces of other tools are not here")
@pytest.mark.parametrize(("name", "least"), [("sglang_qwen3_8b_decode", 10)])
def test_other_peoples_calls_replay_on_the_host(name: str, least: int, tools: Tools, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    assert tools("import", SHARED / "kineto" / f"{name}.json.gz", "-o", out, "--unique").code == 0
    _code, printed, _err = tools("run", out, "--device=cpu", "--keep-going", "--format=jsonl")
    verdicts = [row["verdict"] for row in map(json.loads, printed.splitlines()) if "verdict" in row]
    assert verdicts.count("ok") >= least and set(verdicts) == {"ok"}
