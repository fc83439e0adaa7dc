"""Attachments of kernels: what is written is read, verified and recovered; older captures have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replayfmt.errors import InvalidCapture, UnsupportedVersion
from replayfmt.format import flatbuffer_tables
from replayfmt.format.codes import FrameKind, KernelKind
from replayfmt.format.definition_tables import TABLES
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.model import Attachment, Kernel
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.writer import CaptureWriter

from .reseal import change_tables
from .samples import SESSION, write_everything, write_small

GOLDEN = Path(__file__).parents[1] / "golden"
TWICE = Kernel("triton::twice", "v1", "triton::twice.v1(Tensor(a!) x) -> ()", KernelKind.triton)


@pytest.fixture()
def writer(tmp_path: Path) -> CaptureWriter:
    return CaptureWriter(tmp_path / "a.opreplay", SESSION)


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "everything.opreplay"
    write_everything(path)
    return path


def contents(reader: CaptureReader) -> dict[str, list[tuple[str, str, bytes]]]:
    """Role, name and bytes of every kernel's attachments, by the kernel's name."""
    return {
        kernel.qualified_name: [
            (found.role, found.name, bytes(reader.payload(found.payload)))
            for found in (reader.attachments[number] for number in kernel.attachments)
        ]
        for kernel in reader.kernels[1:]
    }


WRITTEN = {
    "aten::add.Tensor": [],
    "mylib::odd.default": [],
    "triton::spun.default": [],
    "triton::twice.v1": [
        ("source", "twice.py", b"def twice(x):\n    ...\n"),
        ("cubin", "", b"\x7fELF\x00" * 5000),
        ("from_the_future", "später.bin", b""),
    ],
    "inductor_cpp::fused.v1": [("source", "twice.py", b"def twice(x):\n    ...\n")],
}


def test_attachments_come_back_with_their_bytes(capture: Path) -> None:
    with open_capture(capture) as reader:
        assert contents(reader) == WRITTEN
        assert len(reader.attachments) == 4 and reader.attachments[0] is None
        assert reader.kernels[5].attachments == (1,)
    assert check_capture(capture).definitions["attachment"] == 3


def test_a_recovered_capture_keeps_attachments(tmp_path: Path, capture: Path) -> None:
    cut, out = tmp_path / "cut.opreplay", tmp_path / "out.opreplay"
    cut.write_bytes(capture.read_bytes()[:-100])
    recover_capture(cut, out)
    with open_capture(out) as reader:
        assert contents(reader) == WRITTEN


def test_the_same_attachment_and_its_bytes_are_stored_once(writer: CaptureWriter) -> None:
    first, again = (writer.attachment(Attachment("source", "a.py", writer.payload(b"pass"))) for _ in range(2))
    other = writer.attachment(Attachment("source", "b.py", writer.payload(b"pass")))
    assert first == again != other
    plain, attached = writer.kernel(TWICE), writer.kernel(replace(TWICE, attachments=(first,)))
    assert plain != attached == writer.kernel(replace(TWICE, attachments=(again,)))


@pytest.mark.parametrize("role", ["", "Source", "so urce", "../source", "source\n", "9lives", "x" * 65, "größe"])
def test_a_role_is_a_short_identifier(writer: CaptureWriter, role: str) -> None:
    with pytest.raises(ValueError, match="is not an attachment's role"):
        writer.attachment(Attachment(role, "", writer.payload(b"")))


def test_the_writer_refuses_attachments_that_are_not_there(writer: CaptureWriter) -> None:
    for payload in (0, 1, -1):
        with pytest.raises(ValueError, match="payload"):
            writer.attachment(Attachment("source", "", payload))
    for attachments in ((1,), (0,), (-1,)):
        with pytest.raises(ValueError, match="attachment -?[01] is not defined; there are 0"):
            writer.kernel(replace(TWICE, attachments=attachments))
    number = writer.attachment(Attachment("source", "", writer.payload(b"")))
    with pytest.raises(ValueError, match="lists an attachment twice"):
        writer.kernel(replace(TWICE, attachments=(number, number)))


@pytest.mark.parametrize("kind", [KernelKind.triton, KernelKind.inductor_cpp, KernelKind.graph, KernelKind.native])
@pytest.mark.parametrize(
    ("name", "overload"),
    [
        ("triton::a b", "v1"),
        ("triton::../../etc", "v1"),
        ("triton::os.system", "v1"),
        ("triton::twice", "v1; import os"),
        ("triton::twice", ""),
        ("twice", "v1"),
        ("triton::" + "x" * 600, "v1"),
    ],
)
def test_kernels_of_code_have_names_like_operators(
    writer: CaptureWriter, capture: Path, kind: KernelKind, name: str, overload: str
) -> None:
    with pytest.raises(ValueError, match="name"):
        writer.kernel(Kernel(name, overload, TWICE.schema, kind))

    def edit(tables: tuple) -> None:
        for text in (name.encode(), overload.encode()):
            if text not in tables[0]:
                tables[0].append(text)
        columns = tables[1]
        columns["kernel_kind"][3] = kind
        columns["kernel_name"][3] = tables[0].index(name.encode()) + 1
        columns["kernel_overload"][3] = tables[0].index(overload.encode()) + 1

    change_tables(capture, edit)
    with pytest.raises(InvalidCapture, match="name"):
        open_capture(capture)


def test_a_capture_without_attachments_has_no_columns_of_them(tmp_path: Path) -> None:
    path = tmp_path / "small.opreplay"
    write_small(path)
    with open_capture(path) as reader:
        found = 0
        for position in reader.contents.of_kind(FrameKind.tables).tolist():
            _header, body, where = reader.read_frame(position)
            table = flatbuffer_tables.root(body, TABLES, where)
            assert table.column("kernel_attachments") is None and table.column("attachment_role") is None
            found += table.column("kernel_name") is not None
        assert found and reader.kernels[1].attachments == ()


def test_a_kernel_kind_that_is_not_known_yet_is_told_from_damage(capture: Path) -> None:
    def edit(tables: tuple) -> None:
        tables[1]["kernel_kind"][0] = max(KernelKind) + 1

    change_tables(capture, edit)
    with pytest.raises(InvalidCapture, match="kernel_kind holds") as caught:
        open_capture(capture)
    assert not isinstance(caught.value, UnsupportedVersion)
