"""opreplay-trim: what it prints, what it refuses, what it leaves behind, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from replay.rewriting import rewrite
from unseen import write_unseen

import replayfmt
from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.model import Record
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan

from .conftest import Captured, Tool
from .trimmed import compare, ops


def training() -> None:
    layer = torch.nn.Linear(4, 4)
    for step in range(2):
        with replayfmt.scope(f"step {step}"):
            layer(torch.ones(2, 4)).sum().backward()


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "opreplay" in path.name)


def test_it_says_what_it_needs_what_it_verified_and_what_it_wrote(
    captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    path, out = captured(training), tmp_path / "out.opreplay"
    code, text, err = tool("--scope=step 1", path, out)
    assert (code, err) == (0, "")
    lines = text.splitlines()
    assert lines[0].startswith("keeps ") and " storages from before: " in lines[0]
    assert lines[1].startswith("replayed  bitwise") and lines[2].startswith("checked   bitwise")
    assert lines[-1].startswith(f"{out}: {out.stat().st_size:,} bytes, ")
    compare(path, out)
    assert left_behind(tmp_path) == ["capture.opreplay", "out.opreplay"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ops=5:5"], "selects no op"),
        (["--ops=9999:"], "records, with ordinals from 0 to"),
        (["--ops=0:9999"], "records, with ordinals from 0 to"),
        (["--ops=3:1"], "the range ends before it begins"),
        (["--ops=x"], "expected A:B"),
        (["--scope=nowhere"], "has no scope of that name or path; it has"),
        (["--kernel=aten::nothing"], "has no op of that name"),
        (["--kernel=aten::mm", "--kernel=aten::nothing"], "--kernel=aten::nothing"),
        (["--signature=aten::nothing.default()"], "--signature=aten::nothing.default(): selects no op"),
        (["--ops=0:5", "--ops=6:7"], "--ops is given 2 times; it takes one value"),
        (["--signature=("], "--signature"),
        ([], "nothing is selected"),
        (["--ops=0:5", "--script-data=x"], "--script-data is for --script"),
        (["--ops=0:5", "--script=a.py"], "name one output"),
        (["--ops=0:5", "--replay-kernel-substitution=all=x.py"], "--replay-kernel-substitution"),
        (["--payload=none", "--device=cpu", "--verify=none"], "replays nothing: leave --device, --verify out"),
    ],
)
def test_wrong_usage_names_what_is_wrong_and_writes_nothing(
    flags: list[str], said: str, captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    path = captured(training)
    code, text, err = tool(*flags, path, tmp_path / "out.opreplay")
    assert (code, text) == (2, "")
    assert err.startswith("INVALID_ARGUMENT: ") and said in err
    assert left_behind(tmp_path) == ["capture.opreplay"]


def test_a_missing_or_damaged_capture_is_exit_code_3(tool: Tool, tmp_path: Path) -> None:
    assert tool("--ops=0:5", tmp_path / "none", tmp_path / "out")[0] == 3
    (tmp_path / "bad").write_bytes(b"no capture at all" * 20)
    assert tool("--payload=none", tmp_path / "bad", tmp_path / "out")[0] == 3


def test_an_existing_output_is_replaced_only_with_force(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path, out = captured(training), tmp_path / "out.opreplay"
    out.write_text("mine")
    for flags in (["--ops=0:9"], ["--payload=none"]):
        code, _text, err = tool(*flags, path, out)
        assert code == 1 and "exists already" in err and "--force" in err
        assert out.read_text() == "mine"
    assert tool("--payload=none", "--force", path, out)[0] == 0
    assert tool("--ops=0:9", "--force", path, out)[0] == 0
    code, _text, err = tool("--ops=0:9", "--force", path, path)
    assert code == 2 and "is the capture itself; name another file" in err


def test_a_capture_whose_replay_differs_gives_nothing(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    def wrong(record: Record, ints: list[int], floats: list[float]) -> None:
        if record.kind is RecordKind.digest:
            ints[2] += 1  # the hash's low half, behind `of` and `result`

    path, changed = captured(training, digests="ops"), tmp_path / "changed.opreplay"
    rewrite(path, changed, change=wrong)
    with open_capture(changed) as reader:
        last = ops(reader)[-1].ordinal
    code, text, err = tool(f"--ops={last}:", changed, tmp_path / "out.opreplay")
    assert code == 1 and err.startswith("DATA_LOSS: ") and "differs from the capture" in err
    assert text.startswith("keeps ")
    assert left_behind(tmp_path) == ["capture.opreplay", "changed.opreplay"]
    assert tool(f"--ops={last}:", "--verify=none", changed, tmp_path / "out.opreplay")[0] == 0


def reading_what_no_op_wrote() -> None:
    x = torch.ones(3).add(1)
    written = torch.empty(3)
    write_unseen(written)
    y = torch.dot(written, x)
    (y * x).sub(1)
    x.mul(3).sum()


def unsupported_at(path: Path) -> int:
    with open_capture(path) as reader:
        return next(record.ordinal for record in reader.records() if record.kind is RecordKind.unsupported)


def test_unsupported_work_before_the_range_is_refused_unless_only_metadata_is_kept(
    captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    odd, out = captured(reading_what_no_op_wrote), tmp_path / "out.opreplay"
    place = unsupported_at(odd)
    code, _text, err = tool(f"--ops={place + 3}:", odd, out)
    assert code == 1
    assert f"unsupported at ordinal {place}: unseen_write: aten::dot" in err and "--payload=none" in err
    assert not out.exists()
    assert tool(f"--ops={place + 3}:", "--payload=none", odd, out)[0] == 0


def test_unsupported_records_in_the_range_are_kept_and_those_behind_it_do_not_matter(
    captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    odd, out = captured(reading_what_no_op_wrote), tmp_path / "out.opreplay"
    place = unsupported_at(odd)
    code, text, err = tool(f"--ops={place - 2}:", odd, out)
    assert (code, err) == (0, "")
    assert "not replayed: it holds unsupported records" in text
    assert "note      unsupported records are among those kept" in text
    with open_capture(out) as reader:
        assert reader.summary.unsupported == {"unseen_write": 1}
        of = [record.argument("of") for record in reader.records() if record.kind is RecordKind.digest]
        where = next(record.ordinal for record in reader.records() if record.kind is RecordKind.unsupported)
        assert of and all(isinstance(each, int) and each < where for each in of), "none of what lies behind it"
    assert tool(f"--ops=0:{place}", "--force", odd, out)[0] == 0
    with Plan(out) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_an_incomplete_capture_needs_to_be_allowed(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path, torn = captured(training), tmp_path / "torn.opreplay"
    torn.write_bytes(path.read_bytes()[:-64])
    out = tmp_path / "out.opreplay"
    code, _text, err = tool("--ops=0:9", torn, out)
    assert code == 1 and "--allow-incomplete" in err
    for given in (["--payload=none", torn, out], [f"--script={tmp_path / 'a.py'}", "--ops=0:9", torn]):
        code, _text, err = tool(*given)
        assert code == 1 and "--allow-incomplete takes what is there" in err
    assert tool("--payload=none", "--allow-incomplete", torn, tmp_path / "stripped.opreplay")[0] == 0
    assert tool("--ops=0:9", "--allow-incomplete", torn, out)[0] == 0
    compare(torn, out, content=False)


def test_a_trimmed_capture_keeps_its_environment_and_says_what_it_was_made_from(
    captured: Captured, tool: Tool, tmp_path: Path
) -> None:
    def program() -> None:
        torch.ones(3).add(1)
        torch.set_default_dtype(torch.float64)
        torch.ones(3).add(1)
        torch.set_default_dtype(torch.float32)

    path, out = captured(program), tmp_path / "out.opreplay"
    with open_capture(path) as reader:
        last = ops(reader)[-1].ordinal
    assert tool(f"--ops={last}:{last + 1}", path, out)[0] == 0
    with open_capture(path) as reader, open_capture(out) as trimmed:
        one, other = reader.session, trimmed.session
        assert (one.torch_version, one.cpu, one.host, one.argv, one.libraries, one.created_unix_ns) == (
            other.torch_version,
            other.cpu,
            other.host,
            other.argv,
            other.libraries,
            other.created_unix_ns,
        )
        assert one.settings["default_dtype"] == "float32" and other.settings["default_dtype"] == "float64"
        assert other.policies["trimmed-from"] == one.session_id != other.session_id
        assert other.policies["trimmed-selection"] == f"--ops={last}:{last + 1}"
        assert other.policies["trimmed-verified"] in ("bitwise", "none")
        assert "trimmed-elsewhere" not in other.policies


@pytest.mark.slow
def test_content_from_another_machine_is_only_ever_close(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path, foreign, out = captured(training), tmp_path / "foreign.opreplay", tmp_path / "out.opreplay"
    rewrite(path, foreign, session={"cpu": "another processor"})
    code, text, _err = tool("--scope=step 1", foreign, out)
    assert code == 0 and "replayed  close" in text
    with open_capture(out) as reader:
        assert "another processor in the capture" in str(reader.session.policies["trimmed-elsewhere"])
    with open_capture(path) as reader:
        processor = reader.session.cpu
    home = tmp_path / "home.opreplay"
    rewrite(out, home, session={"cpu": processor})
    with Plan(home) as plan:
        verification = plan.execute(verify="auto").verification
    assert verification.mode == "close", "the processor is the captured one, what was computed elsewhere is not"
    assert any("a replay that need not equal the capture" in reason for reason in verification.reasons)


def test_external_files_and_recipes_stay_references_while_nothing_wrote_them(tool: Tool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = tmp_path / "weights.pt"
    torch.save({"w": torch.randn(64, 64), "b": torch.randn(64)}, weights)
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    with replayfmt.capture(path):
        state = torch.load(weights, mmap=True)
        y = torch.ones(2, 64) @ state["w"]
        state["b"].add_(1)
        with replayfmt.scope("kept"):
            y @ state["w"] + state["b"]
    with open_capture(path) as reader:
        origins = [reader.storage(number).origin for number in range(1, reader.storage_count + 1)]
    if StorageOrigin.external_file not in origins:
        pytest.skip("this system's recorder does not find the file behind a map")
    code, text, err = tool("--scope=kept", path, out)
    assert (code, err) == (0, "") and "16,384 bytes in external files" in text
    with open_capture(out) as reader:
        kinds = [reader.storage(number).origin for number in range(1, reader.storage_count + 1)]
        assert kinds.count(StorageOrigin.external_file) == 1, "w is in the file still, b was written"
        assert out.stat().st_size < 16384
    moved = tmp_path / "moved.pt"
    weights.rename(moved)
    code, _text, err = tool("--scope=kept", "--force", path, out)
    assert code == 1 and "--replay-file-remap" in err


@pytest.mark.parametrize("policy", ["capture-ranges", "capture-all"])
def test_of_an_embedded_file_only_the_ranges_that_are_used_come_along(policy: str, tool: Tool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = tmp_path / "weights.pt"
    torch.save({"big": torch.randn(200, 100), "small": torch.randn(20, 10)}, weights)
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    with replayfmt.capture(path, file_policy=policy):
        state = torch.load(weights, mmap=True)
        state["big"].sum()
        with replayfmt.scope("kept"):
            state["small"].sum()
    weights.unlink()
    code, text, err = tool("--scope=kept", path, out)
    assert (code, err) == (0, "")
    assert "800 bytes to embed at most" in text and text.splitlines()[-1].endswith(" 800 bytes of content")
    assert out.stat().st_size < 20_000
    compare(path, out)


def test_places_that_cannot_be_written_are_named(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path = captured(training)
    folder = tmp_path / "folder"
    folder.mkdir()
    for flags in (["--ops=0:9"], ["--payload=none"]):
        for out in (folder, tmp_path / "nowhere" / "out.opreplay"):
            code, _text, err = tool("--force", *flags, path, out)
            assert code == 1 and str(out) in err
    for script in (folder, tmp_path / "nowhere" / "a.py"):
        code, _text, err = tool("--force", "--ops=0:9", f"--script={script}", path)
        assert code == 1 and str(script) in err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["capture.opreplay", "folder"]


def test_scripts_from_the_command_line(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path, script, data = captured(training), tmp_path / "a.py", tmp_path / "a.safetensors"
    code, text, err = tool("--kernel=aten::addmm", f"--script={script}", path)
    assert (code, err) == (0, "") and text.splitlines()[-1] == f"{script}: 2 ops, 4 inputs"
    code, text, err = tool("--kernel=aten::addmm", f"--script={script}", f"--script-data={data}", path)
    assert code == 1 and "--force" in err
    code, text, err = tool("--kernel=aten::addmm", "--force", f"--script={script}", f"--script-data={data}", path)
    assert (code, err) == (0, "")
    assert [line.partition(":")[0] for line in text.splitlines()[2:]] == [str(data), str(script)]


def test_the_result_can_be_dumped_with_the_ordinals_it_had(
    captured: Captured, tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opreplay_tools import dump

    path, out = captured(training), tmp_path / "out.opreplay"
    tool("--kernel=aten::addmm", path, out)
    monkeypatch.setattr(sys, "argv", ["opreplay-dump", "--format=jsonl", str(out)])
    with pytest.raises(SystemExit):
        dump.main()
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = [row for row in rows if row["kind"] == "op"]
    with open_capture(path) as reader:
        names = {record.ordinal: reader.kernels[record.signature.kernel].name for record in ops(reader)}
    assert [names[row["annotation"]["captured_ordinal"]] for row in kept] == ["aten::addmm"] * 2
