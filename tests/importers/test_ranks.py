"""Traces of several ranks in one archive or directory: which file is which rank's, and one capture for each."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest
from in_process import Tool, Tools

import replayfmt
from replayfmt.errors import CaptureFailed, CaptureNotFound, InvalidCapture, OutputExists, UsageError
from replayfmt.format.maintenance import check_capture
from replayfmt.importers.common.json_stream import JsonStream
from replayfmt.importers.importing import import_ranks, import_trace, rank_traces

from .test_execution_trace_graph import Traced, Written
from .traces import MM, SHARED, op, trace


def profiled(rows: int, rank: int | None = None, world: int = 2) -> bytes:
    """A profiler trace of one `mm`, whose first input has as many rows."""
    left = ("float", [rows, 8], [8, 1], "")
    events = [op("aten::mm", 10, 5, [left, MM[1]])]
    about = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    return json.dumps({"schemaVersion": 1, **about, "traceEvents": events}).encode()


def observed(folder: Path, rank: int | None = None, collective: str = "allreduce") -> bytes:
    """An execution trace of one `mm`; where `rank` is given, of a collective as well."""
    made = Written()
    made.node(
        "aten::mm",
        "aten::mm(Tensor self, Tensor mat2) -> Tensor",
        [Traced(1, 2, [2, 3]), Traced(3, 4, [3, 2])],
        [Traced(5, 6, [2, 2])],
    )
    rows = json.loads(made.save(folder / "made.json").read_text())
    (folder / "made.json").unlink()
    if rank is not None:
        values = [[[434, 435, 0, 8, 4, "cuda:1"]], 33, ["0", "default_pg"], rank, collective, [], [], 0, 1, 4]
        node = json.loads(json.dumps(rows["nodes"][-1])) | {"id": 900, "name": "record_param_comms"}
        node["inputs"] = {
            "values": values,
            "shapes": [[[8]], [], [[], []], [], [], [], [], [], [], []],
            "types": [
                "GenericList[Tensor(float)]",
                "Int",
                "Tuple[String,String]",
                "Int",
                "String",
                *["GenericList[]"] * 2,
            ]
            + ["Int"] * 3,
        }
        node["outputs"] = {"values": [], "shapes": [], "types": []}
        rows["nodes"].append(node)
    return json.dumps(rows).encode()


def packed(path: Path, files: dict[str, bytes]) -> Path:
    """The files as a zip, as a tar.gz, or as a directory, by the path's name."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    elif path.suffix == ".gz":
        with tarfile.open(path, "w:gz") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    else:
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    return path


def rows_of(capture: Path) -> tuple[int, int, int]:
    """How many rows the only `mm` of a capture has, its session's rank and world size; the file is checked."""
    check_capture(capture)
    with replayfmt.open(capture) as opened:
        (call,) = opened.ops
        return call.replay().shape[0], opened.session.rank, opened.session.world_size


@pytest.fixture
def tool(tools: Tools) -> Tool:
    """Runs opreplay-import in this process."""
    return partial(tools, "import")


@pytest.mark.parametrize("name", ["ranks.zip", "ranks.tar.gz", "ranks"])
def test_every_rank_of_an_archive_or_a_directory_gets_a_capture_of_its_own(
    name: str, tool: Tool, tmp_path: Path
) -> None:
    files = {
        "b/host.1.pt.trace.json.gz": gzip.compress(profiled(20, 0)),
        "a/host.2.pt.trace.json": profiled(21, 1),
        "a/notes.json": b'{"by": "me"}',
    }
    source = packed(tmp_path / name, files)
    code, printed, err = tool(source, "--rank=all", "-o", tmp_path / "step.{rank}.opreplay")
    assert code == 0, err
    assert f"{tmp_path / 'step.0.opreplay'}: 1 calls\n{tmp_path / 'step.1.opreplay'}: 1 calls\n" in err
    assert [rows_of(tmp_path / f"step.{rank}.opreplay") for rank in (0, 1)] == [(20, 0, 2), (21, 1, 2)]
    assert f"source        {'ranks.zip' if name == 'ranks.zip' else ''}" in printed and "(kineto, rank 1)" in printed
    assert "host.2.pt.trace.json is the trace of rank 1, as it says itself" in printed
    assert "these files are not traces: a/notes.json" in printed
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([name, "step.0.opreplay", "step.1.opreplay"])


def test_one_rank_is_chosen_by_its_number(tool: Tool, tmp_path: Path) -> None:
    source = packed(tmp_path / "ranks.zip", {"rank_0.json": profiled(20), "rank_1.json": profiled(21)})
    code, printed, err = tool(source, "--rank=1", "-o", tmp_path / "x{rank}.opreplay", "--format=jsonl")
    assert code == 0, err
    assert json.loads(printed.splitlines()[0])["rank"] == 1
    assert rows_of(tmp_path / "x1.opreplay") == (21, 1, 2)
    report = import_trace(source, tmp_path / "y.opreplay", rank=0)
    assert rows_of(tmp_path / "y.opreplay") == (20, 0, 2) and report.rank == 0
    assert f"{source}: rank_0.json is the trace of rank 0, by its name" in report.notes


def test_without_the_flag_the_first_is_read_and_the_flag_is_named(tool: Tool, tmp_path: Path) -> None:
    files = {"rank_3.json": profiled(23), "rank_4.json": profiled(24), "rank_5.json.gz": gzip.compress(profiled(25))}
    code, printed, _err = tool(packed(tmp_path / "ranks.zip", files), "-o", tmp_path / "x.opreplay")
    assert code == 0 and rows_of(tmp_path / "x.opreplay")[0] == 23
    assert (
        "of the archive, rank_3.json was read, its first JSON file; not read: rank_4.json, rank_5.json.gz; "
        "--rank=N or --rank=all imports the traces of other ranks" in printed
    )
    code, _printed, err = tool(packed(tmp_path / "folder", files), "-o", tmp_path / "y.opreplay")
    assert code == 3 and "is a directory" in err and "--rank=N or --rank=all imports the traces in it" in err
    only = packed(tmp_path / "packed.zip", {"rank_0.json.gz": gzip.compress(profiled(20))})
    code, _printed, err = tool(only, "-o", tmp_path / "y.opreplay")
    assert code == 3 and "--rank=N or --rank=all imports those of ranks" in err


@pytest.mark.parametrize("name", ["ranks.zip", "ranks.tar.gz", "ranks"])
def test_execution_traces_tell_their_rank_by_the_collectives_of_all_ranks(name: str, tmp_path: Path) -> None:
    files = {"et_7.json": observed(tmp_path, rank=1), "et_9.json": observed(tmp_path, rank=0)}
    reports = import_ranks(packed(tmp_path / name, files), str(tmp_path / "{rank}.opreplay"))
    assert sorted(reports) == [0, 1]
    assert any("et_7.json is the trace of rank 1, as it says itself" in note for note in reports[1].notes)
    with replayfmt.open(tmp_path / "1.opreplay") as capture:
        assert capture.session.rank == 1 and capture.session.policies["import"] == "execution-trace"


def test_the_root_of_a_broadcast_is_no_rank_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "et.json"
    path.write_bytes(observed(tmp_path, rank=0, collective="broadcast"))
    with pytest.raises(UsageError, match=r"no trace of rank 0; no trace in it shows its rank; .*et\.json"):
        rank_traces(path).of(0)


def test_resources_of_one_rank_are_not_those_of_another(tmp_path: Path) -> None:
    from replayfmt.importers.execution_trace.allocations import TracedContent

    files = {f"et_rank_{each}_resources/kernel.py": f"# {each}".encode() for each in range(2)}
    source = packed(tmp_path / "ranks.tar.gz", {"et_rank_0.json": b"{}", "et_rank_1.json": b"{}", **files})
    assert [TracedContent(str(source), f"et_rank_{each}.json").source("kernel.py") for each in range(2)] == [
        "# 0",
        "# 1",
    ]
    assert TracedContent(str(source), "renamed.json").source("kernel.py") is not None


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank_0.json", "rank_1.json"], [0, 1]),
        (["run-3/rank-10/t.json", "run-3/rank-2/t.json"], [10, 2]),
        (["Rank0_step5.json", "RANK1_step5.json"], [0, 1]),
        (["host_0_et.json", "host_1_et.json", "host_2_et.json"], [0, 1, 2]),
        (["host_812.json", "host_813.json"], [None, None]),
        (["local_rank_0_a.json", "local_rank_1_b.json"], [None, None]),
        (["a.json", "rank_1.json"], [None, 1]),
        (["frank1.json", "hank2.json"], [None, None]),
        (["rank_123456789.json", "x.json"], [None, None]),
    ],
)
def test_names_tell_ranks_where_they_are_sure(names: list[str], ranks: list[int | None], tmp_path: Path) -> None:
    source = packed(tmp_path / "ranks.zip", {name: profiled(4) for name in names})
    assert [each.rank for each in rank_traces(source).candidates] == ranks


def test_what_a_trace_says_of_itself_counts_more_than_its_name(tmp_path: Path) -> None:
    files = {"node0/rank0.json": profiled(20, 0, 2), "node1/rank0.json": profiled(21, 1, 2)}
    assert [each.rank for each in rank_traces(packed(tmp_path / "ranks", files)).all()] == [0, 1]
    late = json.dumps({"traceEvents": json.loads(profiled(20))["traceEvents"], "distributedInfo": {"rank": 5}})
    source = packed(tmp_path / "late.zip", {"rank_1.json": late.encode()})
    with pytest.raises(InvalidCapture, match=r"is assumed to be rank 1 \(by its name\), but contains rank 5"):
        import_trace(source, tmp_path / "x.opreplay", rank=1)
    assert not (tmp_path / "x.opreplay").exists()


def test_ranks_that_are_not_sure_are_refused_by_name(tool: Tool, tmp_path: Path) -> None:
    out = tmp_path / "{rank}.opreplay"
    twice = packed(tmp_path / "twice.zip", {"a/rank_0.json": profiled(4), "b/rank_0.json": profiled(4)})
    for flag in ("--rank=all", "--rank=0"):
        code, _printed, err = tool(twice, flag, "-o", out)
        assert code == 2 and "has 2 traces of rank 0: a/rank_0.json, b/rank_0.json; move the unwanted" in err
    untold = packed(tmp_path / "untold.zip", {"a.json": profiled(4), "rank_1.json": profiled(4)})
    code, _printed, err = tool(untold, "--rank=all", "-o", out)
    assert code == 2 and "neither content nor name shows the rank of a.json: rename it" in err
    code, _printed, err = tool(untold, "--rank=3", "-o", out)
    assert code == 2 and "has no trace of rank 3; it has those of rank 1" in err
    both = packed(tmp_path / "both.zip", {"et_rank_0.json": observed(tmp_path), "rank_0.json": profiled(20)})
    code, _printed, err = tool(both, "--rank=0", "-o", out)
    assert code == 2 and "of the kinds execution-trace and kineto; say which with --from=execution-trace" in err
    assert tool(both, "--rank=0", "--from=kineto", "-o", out).code == 0
    assert rows_of(tmp_path / "0.opreplay")[0] == 20


@pytest.mark.slow
def test_ranks_that_are_missing_are_said(tool: Tool, tmp_path: Path) -> None:
    files = {f"rank_{each}.json": profiled(4, each, 1 << 23) for each in (1, 2, 5)}
    code, _printed, err = tool(packed(tmp_path / "r.zip", files), "--rank=all", "-o", tmp_path / "{rank}.opreplay")
    assert code == 0 and "of 8388608 ranks, the traces of ranks 0, 3-4, 6-8388607 are not there" in err
    given = packed(tmp_path / "given", {f"{each}.json": profiled(4, each % 2, 2 + each // 2) for each in range(3)})
    first, second, third = (given / f"{each}.json" for each in range(3))
    for traces, words in (
        ([first], "of 2 ranks, the traces of rank 1 are not there; give those of all"),
        ([first, second, first], f"has 2 traces of rank 0: {first}, {first}"),
        ([second, third], f"the traces are of different jobs: {second} is of 2 ranks; {third} is of 3 ranks"),
        ([first, second, "--unique"], "import it without --unique"),
        ([first, second, "--rank=1"], "is a folder, for all ranks"),
    ):
        code, _printed, err = tool(*traces, "-o", f"{tmp_path}/out/")
        assert code == 2 and err.count("\n") == 1 and words in err, err
        assert not (tmp_path / "out").exists()
    code, _printed, err = tool(first, second, "-o", tmp_path / "x.opreplay")
    assert code == 2 and "2 traces, those of ranks, go to a folder: -o out/" in err
    assert tool(first, second, "-o", f"{tmp_path}/out/").code == 0
    assert [rows_of(tmp_path / f"out/rank{each}.opreplay") for each in (0, 1)] == [(4, 0, 2), (4, 1, 2)]
    assert json.loads((tmp_path / "out/manifest.json").read_text())["problems"] == []
    whole = packed(tmp_path / "r.tar.gz", {f"rank_{each}.json": os.urandom(4000).hex().encode() for each in range(3)})
    first = packed(tmp_path / "first.tar.gz", {"rank_0.json": profiled(4), "pad.bin": whole.read_bytes()})
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(first.read_bytes()[:-2000])
    code, _printed, err = tool(cut, "--rank=all", "-o", tmp_path / "cut{rank}.opreplay")
    assert code == 0 and "traces of other ranks may be missing" in err


def test_either_all_captures_are_there_or_none(tool: Tool, tmp_path: Path) -> None:
    bad = b'{"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "x"}]}'
    source = packed(tmp_path / "ranks.zip", {"rank_0.json": profiled(20), "rank_1.json": bad})
    place = tmp_path / "out"
    place.mkdir()
    code, _printed, err = tool(source, "--rank=all", "-o", place / "{rank}.opreplay")
    assert code == 3 and f"rank 1 ({source}: rank_1.json): " in err and not list(place.iterdir())
    good = packed(tmp_path / "good.zip", {f"rank_{each}.json": profiled(20 + each) for each in range(2)})
    (place / "1.opreplay").write_text("mine")
    code, _printed, err = tool(good, "--rank=all", "-o", place / "{rank}.opreplay")
    assert code == 1 and "1.opreplay: exists already" in err
    assert [each.name for each in place.iterdir()] == ["1.opreplay"] and (place / "1.opreplay").read_text() == "mine"
    code, _printed, err = tool(source, "--rank=all", "-o", place / "{rank}.opreplay", "--force")
    assert code == 3 and (place / "1.opreplay").read_text() == "mine"
    assert tool(good, "--rank=all", "-o", place / "{rank}.opreplay", "--force").code == 0
    assert [rows_of(place / f"{each}.opreplay")[0] for each in range(2)] == [20, 21]
    assert len(list(place.iterdir())) == 2


def test_a_capture_that_cannot_get_its_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packed(tmp_path / "ranks.zip", {f"rank_{each}.json": profiled(20) for each in range(2)})

    def refuse(_from: str, to: str) -> None:
        raise PermissionError(1, "Operation not permitted", to)

    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda one, two: (refuse if two == f"{tmp_path}/1.opreplay" else replace)(one, two)
    )
    with pytest.raises(CaptureFailed, match=r"1\.opreplay: is complete, but could not be renamed: Operation not"):
        import_ranks(source, f"{tmp_path}/{{rank}}.opreplay")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0.opreplay", "ranks.zip"]


def test_what_would_overwrite_or_mean_nothing_is_refused(tool: Tool, tmp_path: Path) -> None:
    folder = packed(tmp_path / "f", {"rank_0.json": profiled(4), "rank_1.json": profiled(4)})
    for arguments, code, words in (
        (["--rank=all", "-o", "x.opreplay"], 2, "put {rank} into the name"),
        (["-o", "x.{rank}.opreplay"], 2, "which rank is meant"),
        (["--rank=all", "-o", f"{folder}/rank_{{rank}}.json", "--force"], 2, "would take the trace's place"),
        (["--rank=1", "-o", f"{folder}/rank_1.json", "--force"], 2, "would take the trace's place"),
        (["--rank=all", "-o", "{rank}.opreplay", "--report", "1.opreplay"], 2, "must be different files"),
        (
            ["--rank=all", "-o", "{rank}.opreplay", "--report", f"{folder}/rank_1.json", "--force"],
            2,
            "must be different files",
        ),
        (["--rank=all", "-o", "{rank}.opreplay", "--graph-capture", "x.json"], 2, "a trace of one rank"),
        (["--rank=all", "-o", "{rank}/x.opreplay"], 1, "there is no directory"),
        *((["--rank=" + text, "-o", "x.opreplay"], 2, "--rank=") for text in ("-1", "", "²", "1_0", "ALL", "9" * 40)),
    ):
        found, _printed, err = tool(folder, *arguments)
        assert (found, err.count("\n")) == (code, 1) and words in err, (arguments, err)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["f"] and len(list(folder.iterdir())) == 2


def test_what_is_no_trace_of_any_rank_is_one_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidCapture, match="the directory has no trace in it"):
        rank_traces(empty)
    (empty / "x.json").mkdir()
    os.mkfifo(empty / "rank_0.json")
    with pytest.raises(InvalidCapture, match="the directory has no trace in it"):
        rank_traces(empty)
    with pytest.raises(InvalidCapture, match="the archive has no trace in it; it has a.py"):
        rank_traces(packed(tmp_path / "a.zip", {"a.py": b""}))
    with pytest.raises(InvalidCapture, match=r"has no trace in it; these files are not traces: a\.json, b\.json"):
        rank_traces(packed(tmp_path / "b.zip", {"a.json": b"{}", "b.json": b"x"}))
    with pytest.raises(InvalidCapture, match="has no trace of kind kineto in it"):
        rank_traces(packed(tmp_path / "c.zip", {"rank_0.json": observed(tmp_path)}), "kineto")
    with pytest.raises(CaptureNotFound):
        rank_traces(tmp_path / "nowhere")
    replay = packed(tmp_path / "replay.zip", {"event_replay_ir.json": b"[]"})
    with pytest.raises(UsageError, match="import it without --rank"):
        rank_traces(replay)
    for rank in (-1, True, 1.0, "1"):
        with pytest.raises(UsageError, match="expected a whole number from 0"):
            import_trace(replay, tmp_path / "x.opreplay", rank=rank)  # type: ignore[arg-type]
    with pytest.raises(OutputExists):
        import_trace(replay, replay.with_name("b.zip"), rank=0)


@pytest.mark.slow
def test_a_packed_member_that_is_cut_off_gives_what_is_there(tmp_path: Path) -> None:
    events = [op("aten::mm", 10 * each, 5, MM) for each in range(4000)]
    whole = trace(tmp_path / "t.json.gz", events).read_bytes()
    for name in ("r.zip", "r.tar.gz"):
        source = packed(tmp_path / name, {"rank_0.json.gz": whole[: len(whole) // 2]})
        with JsonStream.open(source, member="rank_0.json.gz") as stream:
            assert sum(key == "traceEvents" for key, _value in stream.entries({"traceEvents"})) > 1000
            assert not stream.complete
        source = packed(tmp_path / name, {"rank_0.json.gz": whole})
        with JsonStream.open(source, member="rank_0.json.gz") as stream:
            assert sum(key == "traceEvents" for key, _value in stream.entries({"traceEvents"})) == 4000
            assert stream.complete


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared traces")
def test_real_traces_tell_their_ranks(tmp_path: Path) -> None:
    trained = rank_traces(SHARED / "kineto" / "mi300_resnet_ddp_checkpoint_train.json.gz")
    assert trained.of(0).world_size == 8
    (second,) = (each for each in rank_traces(SHARED / "execution_trace" / "resnet_2gpu_et_v1.1.0.json.gz").all())
    assert (second.rank, second.told) == (1, "as it says itself")
    folder = tmp_path / "vllm"
    folder.mkdir()
    for rank, name in enumerate(("mi300_vllm_decode.json.gz", "h100_bert_small_inference.json.gz")):
        (folder / f"rank{rank}.json.gz").symlink_to(SHARED / "kineto" / name)
    reports = import_ranks(folder, str(tmp_path / "{rank}.opreplay"), unique=True)
    assert [sum(report.calls().values()) > 0 for report in reports.values()] == [True, True]
    for rank in reports:
        check_capture(tmp_path / f"{rank}.opreplay")
