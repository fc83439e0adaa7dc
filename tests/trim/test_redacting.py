"""A capture with less in it: redacted, or without floating-point content. What stays is exactly what was there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from format.reseal import change_records
from format.samples import write_everything
from in_process import Tools, tools  # noqa: F401 - a fixture

import replayfmt
from replayfmt.dump.contents import contained
from replayfmt.errors import OutputExists, ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan
from replayfmt.trim.trimming import TrimResult, copy_capture

from .conftest import Captured, Tool
from .trimmed import ops

SECRET = 12345.6789
NUMBERS = 987654321


def outside() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Made before the capture, so that it enters as content."""
    return torch.full((4, 4), SECRET), torch.arange(3) + NUMBERS, torch.zeros(4)


def make(captured: Captured, name: str = "capture", **options: object) -> Path:
    weights, lengths, scratch = outside()

    def run() -> None:
        with replayfmt.scope("execute"):
            hidden = torch.nn.functional.dropout(weights @ weights, 0.5)
            (hidden.sum() + lengths.sum()).item()
            scratch.add_(1)
            torch.randn(3).exp()
            scratch.view(torch.int32).add_(1)

    return captured(run, name, digests="ops", **options)


def copy(path: Path, out: Path, *, redact: bool = False, integers: bool = False, force: bool = False) -> TrimResult:
    with open_capture(path) as reader:
        return copy_capture(reader, str(out), redact=redact, integers_only=integers, force=force)


def bytes_of(path: Path) -> bytes:
    """Everything in a file, decompressed."""
    with open_capture(path) as reader:
        frames = b"".join(
            reader.read_frame(number)[1]
            for number in range(len(reader.contents.frames))
            if not reader.contents.payloads.size
        )
        return (
            path.read_bytes()
            + frames
            + b"".join(bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1))
        )


def test_a_redacted_capture_replays_bit_for_bit_and_tells_nothing_of_the_machine(
    captured: Captured, tmp_path: Path
) -> None:
    path, out = make(captured), tmp_path / "redacted.opreplay"
    result = copy(path, out, redact=True)
    assert result.notes == [] and result.ops == len(replayfmt.open(path).ops)
    with Plan(out) as plan:
        done = plan.execute(verify="bitwise")
    assert done.outcome == "ok" and done.verification.digests > 5
    with open_capture(path) as before, open_capture(out) as after:
        told = contained(after)
        assert not (told.host_name or told.user_names or told.working_directory or told.command_line)
        assert not told.other_paths
        assert after.session.policies["redact"] is True and after.session.session_id != before.session.session_id
        assert [(each.args, each.results) for each in ops(after)] == [(each.args, each.results) for each in ops(before)]
        assert before.summary.records[RecordKind.generator_state] == after.summary.records[RecordKind.generator_state]
    check_capture(out)


def test_without_floating_point_content_integers_stay_and_statistics_take_the_place_of_the_rest(
    captured: Captured, tmp_path: Path
) -> None:
    path, out = make(captured), tmp_path / "integers.opreplay"
    secret, numbers = torch.full((1,), SECRET).numpy().tobytes(), torch.tensor([NUMBERS]).numpy().tobytes()
    assert secret in bytes_of(path)
    copy(path, out, integers=True)
    assert secret not in bytes_of(out) and numbers in bytes_of(out)
    with open_capture(out) as reader:
        told = contained(reader)
        assert told.digests == told.scalar_results == 0 and told.recipe_statistics == 1
        (recipe,) = reader.recipes[1:]
        assert recipe.elements == 16 and recipe.statistics.mean == pytest.approx(SECRET)
        assert (reader.session.policies["payload"], reader.session.policies["digests"]) == ("integers", "none")
    with Plan(out) as plan:
        result = plan.execute(verify="auto")
    assert result.outcome == "ok" and result.verification.mode == "none"
    check_capture(out)
    again = copy(out, tmp_path / "again.opreplay", integers=True)
    assert again.ops == len(replayfmt.open(path).ops)


def test_it_holds_what_a_capture_made_with_that_policy_holds(captured: Captured, tmp_path: Path) -> None:
    weights, lengths, _scratch = outside()

    def run() -> None:
        (weights @ weights).sum()
        lengths.sum()

    direct = captured(run, "direct", payload="integers")
    copy(captured(run, "full"), tmp_path / "copied.opreplay", integers=True)
    with open_capture(direct) as made, open_capture(tmp_path / "copied.opreplay") as copied:
        assert copied.recipes[1:] == made.recipes[1:]
        assert {bytes(copied.payload(n)) for n in range(1, len(copied.payloads) + 1)} == {
            bytes(made.payload(n)) for n in range(1, len(made.payloads) + 1)
        }


def test_files_are_named_without_their_directories_and_apart(captured: Captured, tmp_path: Path) -> None:
    tensors, files = [], []
    for number in range(2):
        file = tmp_path / f"folder{number}" / "weights.bin"
        file.parent.mkdir()
        file.write_bytes(bytes(range(number, number + 64)))
        files.append(file)
        tensors.append(torch.from_file(str(file), dtype=torch.uint8, size=64))
    path, out = captured(lambda: [each.add(1) for each in tensors], digests="ops"), tmp_path / "redacted.opreplay"
    copy(path, out, redact=True)
    with open_capture(out) as reader:
        assert [file.path for file in reader.files[1:]] == ["weights.bin", "2/weights.bin"]
    with Plan(out, file_remaps=[f"weights.bin={files[0]}", f"2/weights.bin={files[1]}"]) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


@pytest.mark.slow
def test_a_part_is_verified_before_it_is_redacted(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path, out = make(captured), tmp_path / "part.opreplay"
    code, printed, error = tool("--redact", "--payload=integers", "--kernel=aten::mm", path, out)
    assert code == 0, error
    assert "replayed  bitwise" in printed and "checked   bitwise" in printed
    assert printed.splitlines()[-1].startswith(f"{out}: ")
    with open_capture(out) as reader:
        assert [reader.kernels[each.signature.kernel].name for each in ops(reader)] == ["aten::mm"]
        assert reader.session.policies["trimmed-selection"] == "--kernel=aten::mm" and reader.session.host is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["capture.opreplay", "part.opreplay"]


def test_what_does_not_fit_is_refused_and_nothing_is_written(captured: Captured, tool: Tool, tmp_path: Path) -> None:
    path, out = make(captured), tmp_path / "out.opreplay"
    for flags in (
        ("--redact", "--device=cpu", path, out),
        ("--redact", f"--vectors={tmp_path / 'v'}", path),
        ("--payload=integers", "--script=x.py", path),
    ):
        assert tool(*flags)[0] == 2
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(OutputExists):
        copy(path, out, redact=True)
    assert tool("--redact", "--kernel=aten::mm", path, out)[0] == 1 and out.read_text() == "mine"
    partial = tmp_path / "killed.opreplay.partial"
    partial.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ReplayRefused, match="incomplete"):
        copy(partial, tmp_path / "x.opreplay", redact=True)


@pytest.mark.slow
def test_redaction_needs_no_torch(captured: Captured, tmp_path: Path) -> None:
    path = make(captured)
    code = (
        "import sys; sys.modules['torch'] = None; from opreplay_tools import trim; "
        f"sys.argv = ['opreplay-trim', '--redact', {str(path)!r}, {str(tmp_path / 'out.opreplay')!r}]; trim.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert replayfmt.run(tmp_path / "out.opreplay", verify="bitwise").outcome == "ok"


def test_a_capture_that_check_finds_damaged_is_copied_or_refused_in_one_sentence(
    tmp_path: Path,
    tools: Tools,  # noqa: F811
) -> None:
    """A digest of the result of a record that is no op."""
    path = tmp_path / "damaged.opreplay"
    write_everything(path)

    def change(columns: dict) -> None:
        ints = columns["ints"].copy()
        place = next(place for place, value in enumerate(ints.tolist()) if value == 5 and ints[place + 1] == 0)
        ints[place] = 0
        columns["ints"] = ints

    change_records(path, change, 1)
    assert "DATA_LOSS" in tools("check", path).err
    done = tools("trim", "--redact", "--allow-incomplete", path, tmp_path / "out.opreplay")
    assert done.code == 3 and "a digest of the result of ordinal 0, which is no op" in done.err, done.err
