"""Content out of external files: where it is, whether it is what was captured, and what happens when it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from in_process import Ran, Tools
from safetensors.torch import load_file, save_file

import replayfmt
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.replay.plan import Plan

from .conftest import Captured
from .externals import content_file, externalize

REMAP = "--replay-file-remap"


@pytest.fixture
def source(captured: Captured) -> Path:
    weight = torch.arange(4096, dtype=torch.float32).reshape(64, 64).sin()
    bias = torch.arange(64, dtype=torch.float32)
    return captured(lambda: (weight @ weight + bias).relu().sum(), "embedded")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "models" / "weights.bin"


def reference(source: Path, weights: Path, validation: str = "identity", gap: int = 64, **options: object) -> Path:
    offsets = content_file(source, weights, gap=gap)
    return externalize(
        source, source.with_name(f"references by {validation}.opreplay"), {weights: offsets}, validation, **options
    )  # type: ignore[arg-type]


def replays(capture: Path, *remaps: str) -> None:
    with Plan(capture, file_remaps=remaps) as plan:
        for _ in range(2):
            result = plan.execute(verify="bitwise")
            assert result.outcome == "ok", result.divergence
            assert result.verification.digests > 0


def refusal(capture: Path, *remaps: str) -> tuple[str, ...]:
    with pytest.raises(ReplayRefused) as caught, Plan(capture, file_remaps=remaps):
        pass
    return caught.value.findings


@pytest.mark.slow
@pytest.mark.parametrize("validation", ["identity", "digest", "identity and digest"])
@pytest.mark.parametrize("gap", [64, 8, 7], ids=["aligned", "tight", "unaligned"])
def test_content_comes_from_the_file(source: Path, weights: Path, validation: str, gap: int) -> None:
    replays(reference(source, weights, validation, gap))


def test_what_nothing_writes_is_mapped_and_not_copied(source: Path, weights: Path) -> None:
    with Plan(reference(source, weights)) as plan:
        staged = [each for window in plan.windows(checks=False)[0] for each in window.staged]
        assert {each.source.kind for each in staged} == {ValueKind.range}
        storages = [plan._content.stage(each) for each in staged]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(weights) in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert all(
        any(low <= address < high for low, high in spans) for address in (storage.data_ptr() for storage in storages)
    )
    assert all("p" in line[1] for line in maps)  # private: what an op writes never reaches the file


@pytest.mark.parametrize("reason", ["mapped_file", "first_use"])
@pytest.mark.parametrize("written", [False, True])
def test_content_is_placed_in_memory_as_it_was_under_capture(
    captured: Captured, weights: Path, reason: str, written: bool
) -> None:
    weight = torch.arange(512, dtype=torch.float32)
    source = captured(lambda: weight.add_(1) if written else weight.sum(), "embedded")
    files = {weights: content_file(source, weights, gap=8)}
    capture = externalize(source, source.with_name(f"{reason}.opreplay"), files, reason=reason)
    replays(capture)
    with Plan(capture) as plan:
        (staged,) = [each for window in plan.windows(checks=False)[0] for each in window.staged]
        storages = [plan._content.stage(staged) for _ in range(2)]
        assert {storage.data_ptr() % 64 for storage in storages} == {8 if reason == "mapped_file" else 0}


def test_what_is_written_has_fresh_content_in_every_run_and_the_file_stays(captured: Captured, weights: Path) -> None:
    weight = torch.arange(512, dtype=torch.float32)

    def train() -> torch.Tensor:
        weight.mul_(0.5).add_(1)
        return weight.sum()

    capture = reference(captured(train, "embedded"), weights)
    before = weights.read_bytes()
    replays(capture)
    assert weights.read_bytes() == before


def test_content_that_the_program_put_in_place_later_is_read_again_in_every_run(
    captured: Captured, weights: Path
) -> None:
    batch = torch.arange(64, dtype=torch.float32)
    array = batch.numpy()

    def steps() -> None:
        batch.sum()
        array[:] = 7
        batch.sum()

    replays(reference(captured(steps, "embedded", audit=True), weights))


@pytest.mark.slow
def test_a_moved_file_is_found_through_a_remap(source: Path, weights: Path, tmp_path: Path) -> None:
    capture = reference(source, weights)
    elsewhere = tmp_path / "elsewhere"
    weights.parent.rename(elsewhere)
    (finding,) = refusal(capture)
    assert str(weights) in finding and "does not exist" in finding and REMAP in finding
    replays(capture, f"{weights.parent}={elsewhere}")


@pytest.mark.slow
def test_a_copy_fails_by_identity_and_passes_by_digest(source: Path, weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bin"
    capture = reference(source, weights, "identity")
    shutil.copy2(weights, copy)
    (finding,) = refusal(capture, f"{weights}={copy}")
    assert str(copy) in finding and str(weights) in finding and "inode differs" in finding
    assert "--file-validation=digest" in finding and "--add-digests" in finding
    replays(reference(source, weights, "identity and digest"), f"{weights}={copy}")


def test_one_changed_byte_fails_by_digest(source: Path, weights: Path) -> None:
    capture = reference(source, weights, "digest")
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    (finding,) = refusal(capture)
    assert "other content" in finding and "expected" in finding


def test_a_truncated_file_is_refused(source: Path, weights: Path) -> None:
    capture = reference(source, weights)
    length = weights.stat().st_size
    os.truncate(weights, length - 1)
    (finding,) = refusal(capture)
    assert f"has {length - 1} bytes" in finding and f"had {length}" in finding


@pytest.mark.guarantee("file-identity")
def test_a_file_without_identity_and_digest_is_refused(source: Path, weights: Path) -> None:
    (finding,) = refusal(reference(source, weights, "none"))
    assert "neither" in finding and "--file-validation=digest" in finding


def _replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.rename(path)


def _overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"x")


def _shorten(path: Path) -> None:
    found = path.stat()
    os.truncate(path, 80)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [(_replace, "replaced"), (_overwrite, "changed"), (_shorten, "changed"), (Path.unlink, "does not exist")],
)
def test_a_file_that_changes_between_plan_and_run_is_noticed(
    source: Path, weights: Path, harm: object, expected: str
) -> None:
    with Plan(reference(source, weights)) as plan:
        plan.execute()
        harm(weights)  # type: ignore[operator]
        with pytest.raises(ReplayRefused) as caught:
            plan.execute()
    assert expected in caught.value.findings[0] and str(weights) in caught.value.findings[0]


class _Modifier:
    """Watches every op, and modifies a file before the first one that it sees."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def watches(self, _ordinal: int) -> bool:
        return True

    def before(self, _ordinal: int, _storages: object) -> None:
        os.utime(self.path)

    def after(self, _ordinal: int, _results: object, _args: object) -> None:
        pass


def test_a_file_that_changes_while_ops_run_is_noticed(source: Path, weights: Path) -> None:
    path = reference(source, weights, "digest")
    with Plan(path) as plan, pytest.raises(ReplayRefused, match="not what they were"):
        plan.watch(_Modifier(weights), plan.reader.record_count)
    with Plan(path) as plan:
        ordinal = next(record.ordinal for record in plan.reader.records() if record.kind is RecordKind.op)
        os.utime(weights)
        with pytest.raises(ReplayRefused, match="not what they were"):
            plan.run_single(ordinal)


@pytest.mark.slow
def test_symbolic_links_are_followed(source: Path, weights: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.bin"
    capture = reference(source, weights, named=lambda path: str(link))
    link.symlink_to(weights)
    replays(capture)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    assert "does not exist" in refusal(capture)[0]
    link.unlink()
    link.symlink_to(link)
    assert "circle" in refusal(capture)[0]


@pytest.mark.slow
def test_a_relative_path_is_relative_to_the_working_directory(
    source: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = reference(source, weights, named=lambda path: f"{path.parent.name}/{path.name}")
    monkeypatch.chdir(weights.parent.parent)
    replays(capture)
    monkeypatch.chdir(weights.parent)
    assert "does not exist" in refusal(capture)[0]
    replays(capture, "models=.")


def test_a_directory_in_place_of_the_file_is_refused(source: Path, weights: Path) -> None:
    capture = reference(source, weights)
    weights.unlink()
    weights.mkdir()
    assert "is a directory" in refusal(capture)[0]


def test_what_is_no_regular_file_is_refused_and_never_waited_for(source: Path, weights: Path) -> None:
    capture = reference(source, weights)
    weights.unlink()
    os.mkfifo(weights)
    assert "not a regular file" in refusal(capture)[0]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read the file")
def test_a_file_that_may_not_be_read_is_refused(source: Path, weights: Path) -> None:
    capture = reference(source, weights)
    weights.chmod(0)
    script = textwrap.dedent("""
        import os, sys
        from replayfmt.errors import ExternalFileProblem
        from replayfmt.format.external_files import OpenedFile
        os.seteuid(65534)
        try:
            OpenedFile(sys.argv[1])
        except ExternalFileProblem as error:
            print(error)
    """)
    for directory in weights.parents:  # the file's own permissions are to be what is in the way
        if not directory.stat().st_mode & 1:
            directory.chmod(directory.stat().st_mode | 0o111)
    done = subprocess.run([sys.executable, "-c", script, str(weights)], capture_output=True, text=True, timeout=600)
    assert "permission denied" in done.stdout, done.stderr
    weights.chmod(0o600)
    replays(capture)


def test_remaps_are_applied_once(source: Path, weights: Path, tmp_path: Path) -> None:
    capture = reference(source, weights, "digest")
    other = tmp_path / "other"
    weights.parent.rename(other)
    with pytest.raises(UsageError, match="matches no external file"):
        Plan(capture, file_remaps=[f"{weights.parent}={other}", f"{other}={weights.parent}"])


def test_captured_roots_are_remapped_each_to_its_place(captured: Captured, tmp_path: Path) -> None:
    a, b = torch.randn(256), torch.randn(256)
    source = captured(lambda: (a + b).sum(), "embedded")
    first, second = tmp_path / "a" / "w.bin", tmp_path / "b" / "w.bin"
    files = {first: content_file(source, first, only=[1]), second: content_file(source, second, only=[2])}
    capture = externalize(source, tmp_path / "references.opreplay", files, "digest")
    first.parent.rename(tmp_path / "x")
    second.parent.rename(tmp_path / "a")  # loops: a → x and b → a, each applied once
    assert len(refusal(capture)) == 2  # a/w.bin is there, but it is the other file
    replays(capture, f"{tmp_path / 'a'}={tmp_path / 'x'}", f"{tmp_path / 'b'}={tmp_path / 'a'}")


def test_all_files_are_looked_at_before_anything_is_refused(captured: Captured, tmp_path: Path) -> None:
    a, b = torch.randn(256), torch.randn(256)
    source = captured(lambda: (a + b).sum(), "embedded")
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    files = {first: content_file(source, first, only=[1]), second: content_file(source, second, only=[2])}
    capture = externalize(source, tmp_path / "references.opreplay", files)
    first.unlink()
    os.truncate(second, 3)
    findings = refusal(capture)
    assert "does not exist" in findings[0] and "has 3 bytes" in findings[1]


@pytest.mark.parametrize(
    ("remap", "message"),
    [("/models", "no `=`"), ("=/models", "empty"), ("/nowhere=/models", "matches no external file")],
)
def test_a_remap_that_says_nothing_is_wrong_usage(source: Path, weights: Path, remap: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(reference(source, weights), file_remaps=[remap])


@pytest.mark.parametrize("embed", ["ranges", "all"])
def test_embedded_ranges_need_no_file_and_are_no_storage_benchmark(source: Path, weights: Path, embed: str) -> None:
    capture = reference(source, weights, embed=embed)
    weights.unlink()
    replays(capture)
    with Plan(capture) as plan:
        assert any("not a benchmark of storage" in note for note in plan.notes)


def test_keep_going_refuses_only_what_reads_the_missing_file(captured: Captured, weights: Path) -> None:
    weight = torch.randn(64)
    capture = reference(captured(lambda: (weight.exp().sin(), torch.ones(2).cos()), "embedded"), weights)
    weights.unlink()
    with Plan(capture, keep_going=True) as plan:
        result = plan.execute(keep_going=True, verify="bitwise")
    assert result.totals()["refused"] == 1 and result.totals()["skipped"] == 1 and result.totals()["ok"] >= 2
    assert result.verdicts is not None
    (refused,) = [each for each in result.verdicts if each.verdict == "refused"]
    assert str(weights) in refused.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_long_content_reaches_a_gpu_through_pinned_memory(captured: Captured, weights: Path) -> None:
    weight = torch.randn(25_000_000)  # three pieces and a bit
    capture = reference(captured(lambda: weight.view(torch.int32).bitwise_xor(3), "embedded"), weights)
    with Plan(capture, ["cuda"]) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["run", "benchmark"])
def test_the_tools_take_remaps(source: Path, weights: Path, tool: str, tools: Tools) -> None:
    capture = reference(source, weights)
    moved = weights.parent.rename(weights.parent.with_name("moved"))

    def run(*args: str) -> Ran:
        return tools(tool, *args, capture)

    few = ["--benchmark-min-time=1x"] if tool == "benchmark" else []
    code, out, err = run(*few)
    assert (code, out) == (1, "") and f"external file {weights} does not exist; {REMAP}=CAPTURED=REPLAY" in err
    code, _out, err = run(*few, f"{REMAP}={weights.parent}={moved}")
    assert code == 0, err
    for wrong in ("nothing", f"/nowhere={moved}", f"={moved}"):
        code, out, err = run(*few, f"{REMAP}={wrong}")
        assert (code, out) == (2, "") and err.startswith(f"INVALID_ARGUMENT: {REMAP}={wrong}")


@pytest.mark.slow
def test_one_op_alone_takes_its_content_from_the_file(source: Path, weights: Path) -> None:
    capture = reference(source, weights)
    weight = torch.arange(4096, dtype=torch.float32).reshape(64, 64).sin()
    with replayfmt.open(capture) as opened:
        first = opened.ops[0]
        assert torch.equal(first.replay(), weight @ weight)
    moved = weights.parent.rename(weights.parent.with_name("moved"))
    with replayfmt.open(capture) as opened:
        first = opened.ops[0]
        with pytest.raises(ReplayRefused, match="not here as it was captured"):
            first.replay()
        assert torch.equal(first.replay(file_remaps=[f"{weights.parent}={moved}"]), weight @ weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "aaaa", "aaaaaaa"])  # data begins at 8 past a multiple of 64, and elsewhere
def test_a_mapped_checkpoint_gives_the_same_bits_wherever_its_data_begins(
    captured: Captured, tmp_path: Path, name: str
) -> None:
    save_file({name: torch.randn(64, 77), "vector": torch.randn(77)}, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    capture = captured(lambda: (loaded[name] @ loaded["vector"], torch.dot(loaded[name][0], loaded["vector"])))
    with replayfmt.open(capture) as opened:
        assert len(opened.reader.files) == 2
    replays(capture)
