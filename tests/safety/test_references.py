"""What a capture refers to outside of itself: nothing is read before it is validated, and nothing is ever written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failure.table import recorded
from in_process import Tools
from replay.externals import content_file, described, imported_payloads
from replay.rewriting import rewrite

from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.external_files import FileRemaps
from replayfmt.format.model import ExternalFile, FileIdentity, FileRange, Node, Record, Signature
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.writer import CaptureWriter
from replayfmt.replay.plan import Plan


def refers(folder: Path, file: ExternalFile, offset: int = 64, length: int = 64) -> Path:
    """A capture whose one weight is a range of `file`, whatever that is."""
    weight = torch.arange(length / 4)
    source = recorded(folder, lambda: weight * 2, "embedded")
    numbers: list[int] = []

    def prepare(_reader: CaptureReader, writer: CaptureWriter) -> None:
        numbers.append(writer.range(FileRange(writer.file(file), offset, length)))

    def signature(one: Signature) -> Signature:
        if one.kind is not RecordKind.storage_import:
            return one
        return replace(
            one,
            args=tuple(
                Node(ValueKind.range, node.name) if node.kind is ValueKind.payload else node for node in one.args
            ),
        )

    def change(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.storage_import:
            names = [node.name for node in record.signature.args if node.kind is not ValueKind.string]
            ints[names.index("payload")] = numbers[0]

    def births(origins: Any, contents: Any) -> Any:
        moved = origins == StorageOrigin.payload
        contents = contents.copy()
        contents[moved] = numbers[0]
        origins = origins.copy()
        origins[moved] = StorageOrigin.external_file
        return origins, contents

    return rewrite(
        source, folder / "refers.opreplay", prepare=prepare, signature=signature, change=change, births=births
    )


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_bytes(b"s3cret-s3cret-s3" * 32)
    return path


def _claims(path: Path, **changes: Any) -> ExternalFile:
    """What somebody who knows that a file is there, but not what is in it, can say of it."""
    return replace(ExternalFile(str(path), path.stat().st_size), **changes)


@pytest.mark.guarantee("file-identity")
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"digest": "0" * 32},
        {"identity": FileIdentity(1, 2, 3)},
        {"digest": "0" * 32, "identity": "its own"},
        {"bytes": 2**50, "identity": "its own"},
    ],
    ids=["nothing", "another digest", "another identity", "its identity and another digest", "another length"],
)
def test_a_file_that_the_capture_cannot_vouch_for_is_never_read(
    tmp_path: Path, secret: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    if changes.get("identity") == "its own":
        found = secret.stat()
        changes = {**changes, "identity": FileIdentity(found.st_dev, found.st_ino, found.st_mtime_ns)}
    path = refers(tmp_path, _claims(secret, **changes))
    with pytest.raises(ReplayRefused):
        Plan(path)
    for command in (
        ("run",),
        ("run", "--keep-going"),
        ("run", "--keep-going", "--format=jsonl", "--verify=none"),
        ("benchmark", "--benchmark-min-time=1x"),
        ("dump",),
        ("dump", "--format=jsonl"),
        ("check",),
    ):
        done = tools(*command, path)
        assert "s3cret" not in done.out + done.err
        if command[0] in ("run", "benchmark"):
            assert done.code == 1, done
    with Plan(path, keep_going=True) as plan:
        result = plan.execute(keep_going=True)
    assert result.totals()["ok"] == 0, "the op that needs it did not run"
    done = tools("check", "--add-digests", tmp_path / "added.opreplay", path)
    assert done.code != 0 and not (tmp_path / "added.opreplay").exists(), "a digest would tell what is in the file"


def _edited_with_its_time_set_back(path: Path) -> None:
    before, content = path.stat(), bytearray(path.read_bytes())
    content[70] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _changed_in_nothing_but_its_time_of_change(path: Path) -> None:
    path.chmod(0o640)
    os.link(path, path.with_name("another name"))


@pytest.mark.parametrize(
    ("change", "validation", "refused"),
    [
        (_edited_with_its_time_set_back, "identity", False),
        (_edited_with_its_time_set_back, "digest", True),
        (_changed_in_nothing_but_its_time_of_change, "identity", False),
        (_changed_in_nothing_but_its_time_of_change, "digest", False),
    ],
)
def test_identity_goes_by_the_time_of_last_modification_and_a_digest_by_the_content(
    tmp_path: Path, secret: Path, change: Callable[[Path], None], validation: str, refused: bool
) -> None:
    """The time of change cannot be set back, but a chmod and a hard link change it, too: it is no part of what a
    capture records of a file. Who can set times back is found by a digest."""
    path = refers(tmp_path, described(secret, validation))
    change(secret)
    if refused:
        with pytest.raises(ReplayRefused):
            Plan(path)
    else:
        with Plan(path) as plan:
            assert plan.execute(verify="none").outcome == "ok"


@pytest.mark.guarantee("file-identity")
@pytest.mark.parametrize(
    "path",
    [
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/mem",
        "/proc/self/environ",
        "/",
        "/dev/tty",
        "",
        "\x00",
        "a" * 5000,
        "nowhere/../../etc/passwd",
    ],
)
def test_what_is_no_regular_file_that_was_captured_is_refused_at_once(tmp_path: Path, path: str) -> None:
    file = ExternalFile(path, 4096, FileIdentity(1, 2, 3), "0" * 32)
    try:
        capture = refers(tmp_path, file)
    except ValueError:
        return  # the format has no such path
    with pytest.raises(ReplayRefused) as refused:
        Plan(capture)
    assert "external file" in refused.value.findings[0]


def test_a_range_outside_its_file_is_no_valid_capture(tmp_path: Path, secret: Path) -> None:
    for offset, length in ((500, 64), (2**60, 64), (64, 2**40)):
        with pytest.raises(ValueError):
            refers(tmp_path, described(secret, "digest"), offset, 64 if length > 2**30 else length)
            raise ValueError
        (tmp_path / "refers.opreplay.partial").unlink(missing_ok=True)
        (tmp_path / "embedded.opreplay").unlink(missing_ok=True)


@pytest.mark.guarantee("remaps")
@pytest.mark.parametrize(
    "captured",
    [
        "/data/../etc/passwd",
        "/data/models/../../etc/passwd",
        "/database/w",
        "/dat",
        "data/w",
        "/other=/data/w",
        "/data=/etc/passwd",
        "--replay-file-remap=/=/etc",
    ],
)
def test_a_capture_cannot_steer_where_a_remap_leads(captured: str) -> None:
    """Only a path below the prefix, component by component and without going up again, is moved, and moved once."""
    remaps = FileRemaps.parse(["/data=/srv/models"])
    assert remaps.apply(captured) == captured
    with pytest.raises(UsageError):
        remaps.check_used([captured])


@pytest.mark.guarantee("remaps")
def test_a_remap_is_applied_once_even_where_its_result_looks_like_another(tmp_path: Path) -> None:
    remaps = FileRemaps.parse(["/a=/b", "/b=/etc"])
    assert remaps.apply("/a/passwd") == "/b/passwd"


WATCHED = """
import sys
import torch, replayfmt, replayfmt.replay.plan
import torch.utils.data, importlib.metadata
from replayfmt.errors import OpReplayError

seen = []
def hook(event, args):
    if event == "open":
        path, mode, flags = args
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & 3:
            seen.append((event, str(path), str(mode)))
    elif event == "import":
        if not args[0].partition(".")[0] in allowed:
            seen.append((event, args[0]))
    elif event.split(".")[0] in ("socket", "subprocess", "shutil", "ftplib", "http", "urllib", "pickle") or (
            event in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename", "os.mkdir",
                      "os.chmod", "os.link", "os.symlink", "os.truncate", "os.rmdir", "ctypes.dlopen", "os.putenv")):
        seen.append((event, *(str(each)[:99] for each in args)))
allowed = {"torch", "replayfmt", "numpy"} | set(sys.stdlib_module_names) | {m.partition(".")[0] for m in sys.modules}
sys.addaudithook(hook)
for path in sys.argv[1:]:
    for keep_going in (False, True):
        try:
            with replayfmt.replay.plan.Plan(path, keep_going=keep_going) as plan:
                for verify in ("auto", "none"):
                    print(path[-20:], plan.execute(verify=verify, keep_going=keep_going).outcome)
        except OpReplayError as error:
            print(path[-20:], type(error).__name__)
writes = [each for each in seen if each[1:2] != ("/proc/self/clear_refs",)]
assert not writes, writes
print("nothing was touched")
"""


@pytest.mark.guarantee("no-side-effects")
@pytest.mark.slow
def test_a_replay_writes_starts_connects_and_imports_nothing(tmp_path: Path) -> None:
    """Seen by the interpreter's audit hook: files opened for writing, processes, sockets, libraries, imports."""
    weight = torch.arange(256.0)
    good = recorded(
        tmp_path, lambda: (weight.view(16, 16) @ weight.view(16, 16), torch.rand(3).tolist()), "good", digests="ops"
    )
    with open_capture(good) as reader:
        payloads = imported_payloads(reader)
    content = tmp_path / "w.bin"
    content_file(good, content, only=payloads[:1])
    hostile = []
    for number, name in enumerate(("aten::from_file", "torchvision::nms", "os::system", "debugprims::load_tensor")):
        hostile.append(
            rewrite(
                good,
                tmp_path / f"hostile{number}.opreplay",
                kernel=lambda kernel, to=name: replace(kernel, name=to) if kernel.name == "aten::mm" else kernel,
            )
        )
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    paths = [good, *hostile, refers(tmp_path, described(content, "digest"))]
    done = subprocess.run(
        [sys.executable, script, *paths],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing was touched"
    assert done.stdout.count(" ok\n") >= 4, done.stdout
