"""Attachments of kernels in copies: those of the kernels that are kept, redacted or without sources on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safety.code_captures import CODE, CONTENT, write
from safety.test_code import Negating

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.maintenance import add_digests, check_capture
from replayfmt.format.model import Attachment, CaptureInfo, ExternalFile, FileIdentity, Kernel
from replayfmt.format.reader import open_capture
from replayfmt.format.redaction import KeptAttachments, Redaction
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.replay.planning.kernels import Effects, ResolvedKernel, effects_of_schema
from replayfmt.replay.resolution import kernel_lookup
from replayfmt.trim.trimming import checked_here, copy_capture, strip_capture, trim_capture

from .conftest import Tool

USERS = "/" + "home"  # in two pieces: no file of the project names a home
SOURCE = f"# {USERS}/alice/kernels/twice.py\ndef twice(x): ...\n".encode()
IR = f'#loc = loc("{USERS}/alice/kernels/twice.py":5:0)\n'.encode()
METADATA = {"target": "cpu", "path": f"{USERS}/alice/kernels/twice.py", "flags": ["-O3"], "threads": 4}
TELLING = [
    ("source", SOURCE),
    ("ttir", IR),
    ("ptx", b".version 8.4\n"),
    ("cubin", b"\x7fELF/"),
    ("metadata", json.dumps(METADATA).encode()),
    ("from_the_future", b"?"),
]


@pytest.fixture()
def telling(tmp_path: Path) -> Path:
    return write(tmp_path / "telling.opreplay", TELLING)


@pytest.fixture()
def negating(monkeypatch: pytest.MonkeyPatch) -> Negating:
    resolver = Negating()
    monkeypatch.setitem(kernel_lookup.RESOLVERS, KernelKind.native, resolver)
    return resolver


def attached(path: Path) -> dict[str, list[tuple[str, str, bytes]]]:
    """Role, name and bytes of the attachments of each kernel, by its name."""
    check_capture(path)
    with open_capture(path) as reader:
        return {
            kernel.name: [
                (each.role, each.name, bytes(reader.payload(each.payload)))
                for each in (reader.attachments[number] for number in kernel.attachments)
            ]
            for kernel in reader.kernels[1:]
        }


def test_a_redacted_copy_has_the_same_attachments_with_names_and_metadata_redacted(
    telling: Path, tmp_path: Path, tool: Tool
) -> None:
    out = tmp_path / "out.opreplay"
    code, printed, error = tool("--redact", telling, out)
    assert code == 0, error
    (found,) = attached(out).values()
    assert [(role, name, content) for role, name, content in found if role != "metadata"] == [
        (role, f"a.{role}", content) for role, content in TELLING if role != "metadata"
    ]
    metadata = next(json.loads(content) for role, _name, content in found if role == "metadata")
    assert metadata == {**METADATA, "path": "(redacted)"}
    assert "5 attachments of kernels kept: code is as it was written" in printed and "--no-sources" in printed


@pytest.mark.parametrize("flags", [["--no-sources"], ["--redact", "--no-sources"], ["--payload=none", "--no-sources"]])
def test_without_sources_nothing_names_a_source_file(
    telling: Path, tmp_path: Path, tool: Tool, flags: list[str]
) -> None:
    out = tmp_path / "out.opreplay"
    code, printed, error = tool(*flags, telling, out)
    assert code == 0, error
    (found,) = attached(out).values()
    assert [role for role, _name, _content in found] == ["ptx", "cubin", "metadata"]
    with open_capture(out) as reader:
        everything = out.read_bytes() + b"".join(bytes(reader.payload(n)) for n in range(1, len(reader.payloads) + 1))
        assert reader.session.policies["no-sources"] is True
    assert b"alice" not in everything and b"twice.py" not in everything
    assert "3 attachments of kernels left out" in printed and "refuses a kernel without one" in printed


def test_what_is_not_redacted_is_copied_exactly(telling: Path, tmp_path: Path, tool: Tool) -> None:
    out = tmp_path / "out.opreplay"
    assert tool("--payload=integers", telling, out)[0] == 0
    assert attached(out) == attached(telling)


def test_stripped_captures_keep_code_unless_it_is_left_out(telling: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    with open_capture(telling) as reader:
        result = strip_capture(reader, str(out), OpSelection())
    assert [role for role, _name, _content in attached(out)["native::negate0"]] == [role for role, _content in TELLING]
    assert result.notes == [
        "5 attachments of kernels kept: code is as it was written, with the names and paths in it; "
        "--no-sources leaves source out"
    ]


def test_a_part_has_the_attachments_of_its_own_kernels(tmp_path: Path, tool: Tool) -> None:
    path, out = tmp_path / "code.opreplay", tmp_path / "out.opreplay"
    write(path, CODE, kernels=3)
    assert tool("--payload=none", "--kernel=native::negate1", path, out)[0] == 0
    assert list(attached(out)) == ["native::negate1"]
    assert [role for role, _name, _content in attached(out)["native::negate1"]] == [role for role, _content in CODE]


class Negate(ResolvedKernel):
    """A kernel that is no operator."""

    own, draws = False, False
    content_decides_sizes = makes_unchecked_views = False

    def __init__(self, kernel: Kernel) -> None:
        self._schema = parse_schema(kernel.schema)

    @property
    def schema(self) -> torch.FunctionSchema:
        return self._schema

    @property
    def call(self) -> Callable[..., torch.Tensor]:
        return lambda self: self.neg_()

    def effects(self, layout: SlotLayout) -> Effects:
        return effects_of_schema(layout, self._schema, False)

    def runs_on(self, device_type: str) -> bool:
        return True


def test_a_part_with_code_is_computed_and_verified_with_leave_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel_lookup.RESOLVERS, KernelKind.native, lambda kernel, _contents, _types: Negate(kernel))
    path, out = write(tmp_path / "code.opreplay", kernels=3), tmp_path / "part.opreplay"
    check = checked_here(lambda part: replayfmt.Plan(part, allow_code=True))
    with (
        replayfmt.Plan(path, keep_going=True) as plan,
        pytest.raises(ReplayRefused, match="what comes before ordinal 3 cannot be replayed here"),
    ):
        trim_capture(plan, str(out), OpSelection(ops="2:3"), check)
    with replayfmt.Plan(path, keep_going=True, allow_code=True) as plan:
        result = trim_capture(plan, str(out), OpSelection(ops="2:3"), check)
    assert result.digests == 1 and ": 1 digest," in result.checked
    assert list(attached(out)) == ["native::negate1"]
    with open_capture(out) as reader:
        assert bytes(reader.payload(reader.storage(1).payload)) == (-CONTENT).tobytes()  # what the first one left


def test_a_copy_without_source_is_replayed_by_its_binary_or_refused(
    tmp_path: Path, negating: Negating, tool: Tool
) -> None:
    path, out = write(tmp_path / "code.opreplay"), tmp_path / "out.opreplay"
    assert tool("--no-sources", path, out)[0] == 0
    replayfmt.Plan(out, allow_code=True).close()
    ((_name, contents, _types),) = negating.seen
    assert set(contents) == {"metadata", "cubin"}
    bare, out = write(tmp_path / "bare.opreplay", [("source", b"pass")]), tmp_path / "none.opreplay"
    assert tool("--no-sources", bare, out)[0] == 0
    with pytest.raises(ReplayRefused) as caught:
        replayfmt.Plan(out, allow_code=True)
    assert "its code is not in the capture" in caught.value.findings[0]


def test_metadata_that_cannot_be_redacted_are_left_out(tmp_path: Path) -> None:
    for metadata in (f"no JSON {USERS}/alice/x.py".encode(), b"[]", b'{"a":' * 65 + b"1" + b"}" * 65):
        path, out = write(tmp_path / "code.opreplay", [("metadata", metadata), ("cubin", b"")]), tmp_path / "o.opreplay"
        with open_capture(path) as reader:
            copy_capture(reader, str(out), redact=True, integers_only=False, force=True)
        assert [role for role, _name, _content in attached(out)["native::negate0"]] == ["cubin"]
        path.unlink()


def test_a_recorder_that_leaves_sources_out_writes_none_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "recorded.opreplay"
    session = CaptureInfo(
        "01234567-89ab-cdef-0123-456789abcdef", "opreplay", "0.1.0", argv=(f"{USERS}/alice/train.py",)
    )
    writer = CaptureWriter(path, session)
    writer.keeps = KeptAttachments(Redaction(session), sources=False)
    attachments = writer.attach((role, f"{USERS}/alice/a.{role}", content) for role, content in TELLING)
    writer.kernel(Kernel("native::a", "v1", "native::a.v1() -> ()", KernelKind.native, attachments))
    writer.close(1)
    with open_capture(path) as reader:
        assert {each.name for each in reader.attachments[1:]} == {"(redacted)"}
        assert set(contents_of(reader, reader.kernels[1])) == {"ptx", "cubin", "metadata"}
        held = b"".join(bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1))
    assert b"alice" not in held and b"twice" not in held


def test_adding_digests_of_files_keeps_attachments(tmp_path: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    data = tmp_path / "data.bin"
    data.write_bytes(bytes(64))
    writer = CaptureWriter(path, CaptureInfo("01234567-89ab-cdef-0123-456789abcdef", "opreplay", "0.1.0"))
    status = data.stat()
    identity = FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)
    writer.file(ExternalFile(str(data), 64, identity))
    plain = writer.kernel(Kernel("aten::mm", "default", "aten::mm(Tensor self, Tensor mat2) -> Tensor"))
    writer.flush()  # so that there is a table without the columns, and one with them
    number = writer.attachment(Attachment("source", "a.py", writer.payload(SOURCE)))
    writer.kernel(Kernel("native::a", "v1", "native::a.v1() -> ()", KernelKind.native, (number,)))
    writer.close(1)
    add_digests(path, out)
    assert plain == 1 and attached(out) == attached(path) == {"aten::mm": [], "native::a": [("source", "a.py", SOURCE)]}
    with open_capture(out) as reader:
        assert reader.files[1].digest is not None
