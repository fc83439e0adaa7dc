"""Versions: what is newer is skipped where that is safe and refused, with its version, where it is not."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from replayfmt.errors import InvalidCapture, UnsupportedVersion
from replayfmt.format.codes import Codec, FrameKind
from replayfmt.format.definition_tables import encode_tables
from replayfmt.format.frames import FLAG_REQUIRED, FrameHeader
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.reader import open_capture

from .reading import read_all
from .reseal import Frame, change, change_header, join, records_body, records_columns, split, tables_of
from .samples import write_everything, write_small


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "versions.opreplay"
    write_small(path, frames=2)
    return path


def _set_version(path: Path, major: int, minor: int) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<HH", major, minor)
    data[56:64] = xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(("major", "minor"), [(0, 9), (2, 0), (3, 7), (0xFFFF, 0xFFFF)])
def test_another_major_version_is_refused_with_the_version_named(capture: Path, major: int, minor: int) -> None:
    for data in (capture.read_bytes(), capture.read_bytes()[:-100]):  # through the index, and when walking
        capture.write_bytes(data)
        _set_version(capture, major, minor)
        for read in (open_capture, check_capture, lambda path: recover_capture(path, path.with_suffix(".out"))):
            with pytest.raises(UnsupportedVersion, match=rf"format version {major}\.{minor}; this reader knows 1\.x"):
                read(capture)


def test_a_newer_minor_version_is_read_with_a_warning(capture: Path) -> None:
    before = read_all(capture)
    _set_version(capture, 1, 7)
    after = read_all(capture)
    assert after[:2] == before[:2]
    reader = open_capture(capture)
    assert reader.version == (1, 7)
    assert any("written by format version 1.7" in warning for warning in reader.warnings)
    assert any("1.7 is newer" in warning for warning in check_capture(capture).warnings)


def _unknown(kind: int, required: bool, count: int = 0, codec: int = 0) -> Frame:
    header = FrameHeader(kind, FLAG_REQUIRED if required else 0, 0, 0, 0, 0, count, 4, codec, 0)
    return Frame(header, b"something from the future")


def _insert(path: Path, *unknown: Frame, at: int, index: bool) -> None:
    preamble, frames = split(path.read_bytes())
    first_ordinal = frames[min(at, len(frames) - 1)].header.first_ordinal
    frames[at:at] = [replace(frame, header=replace(frame.header, first_ordinal=first_ordinal)) for frame in unknown]
    path.write_bytes(join(preamble, frames, index=index))


@pytest.mark.parametrize("index", [True, False], ids=["index", "scan"])
@pytest.mark.parametrize("at", [1, 3, 100])
def test_unknown_optional_frames_are_skipped_and_counted(capture: Path, index: bool, at: int) -> None:
    before = read_all(capture)
    unknown = (_unknown(77, required=False, count=5), _unknown(78, required=False))
    _insert(capture, *unknown, at=at, index=index)
    after = read_all(capture)
    assert after[1:] == before[1:]
    reader = open_capture(capture)
    assert [w for w in reader.warnings if "skipped" in w] == [
        "2 optional frames of unknown kind (77, 78) were skipped; a newer version of opreplay wrote them"
    ]
    if index:
        assert reader.complete
        assert any("skipped" in warning for warning in check_capture(capture).warnings)


@pytest.mark.parametrize("index", [True, False], ids=["index", "scan"])
def test_unknown_required_frames_are_refused_with_the_version_named(capture: Path, index: bool) -> None:
    _insert(capture, _unknown(77, required=True), at=3, index=index)
    for read in (open_capture, check_capture, lambda path: recover_capture(path, path.with_suffix(".out"))):
        with pytest.raises(
            UnsupportedVersion,
            match=r"required frame of unknown kind 77, of format version 1\.4; "
            r"this reader knows 1\.0",
        ):
            read(capture)


def test_an_index_that_hides_a_required_frame_does_not_get_past(capture: Path) -> None:
    _insert(capture, _unknown(77, required=True), at=3, index=True)
    data = capture.read_bytes()
    reader_rows = data.rfind(struct.pack("<IHH", 0, 77, FLAG_REQUIRED))
    assert reader_rows > 0
    changed = data[:reader_rows] + struct.pack("<IHH", 0, 77, 0) + data[reader_rows + 8 :]
    capture.write_bytes(changed)  # breaks the index's hash, so the walk decides
    with pytest.raises(UnsupportedVersion):
        open_capture(capture)


def _newer(frame: Frame, body: bytes) -> Frame:
    return replace(frame, header=replace(frame.header, minor=4), body=body)


@pytest.mark.parametrize(
    ("kind", "name", "value", "match"),
    [
        (FrameKind.tables, "node_kind", 21, "node_kind holds 21"),
        (FrameKind.tables, "signature_kind", 19, "signature_kind holds 19"),
        (FrameKind.tables, "meta_dtype", 47, "meta_dtype holds 47"),
        (FrameKind.tables, "meta_flags", 16, "meta_flags holds 16"),
        (FrameKind.records, "storage_origin", 7, "storage_origin 7"),
    ],
)
def test_codes_of_a_newer_minor_version_are_told_from_damage(
    tmp_path: Path, kind: FrameKind, name: str, value: int, match: str
) -> None:
    for minor, error in ((4, UnsupportedVersion), (0, InvalidCapture)):
        path = tmp_path / f"{minor}.opreplay"
        write_small(path, frames=1)

        def edit(frame: Frame, minor: int = minor) -> Frame:
            if kind == FrameKind.records:
                columns = records_columns(frame.body)
                columns[name][0] = value
                body = records_body(columns)
            else:
                tables = tables_of(frame.body)
                tables[1][name][0] = value
                body = bytes(encode_tables(*tables))
            return replace(frame, header=replace(frame.header, minor=minor), body=body)

        change(path, FrameKind.tables, lambda frame: None, which=-1)
        change(path, kind, edit)
        with pytest.raises(InvalidCapture) as caught:
            read_all(path)
        assert type(caught.value) is error
        if minor:
            assert match in str(caught.value) and "1.4" in str(caught.value)


def test_fields_that_a_newer_minor_version_appended_are_ignored(tmp_path: Path) -> None:
    """A Records table with three more fields than this version knows."""
    import flatbuffers

    from replayfmt.format.flatbuffer_tables import RECORDS

    path = tmp_path / "a.opreplay"
    write_everything(path)
    before = read_all(path)

    def edit(frame: Frame) -> Frame:
        columns = records_columns(frame.body)
        builder = flatbuffers.Builder(1024)
        places = {n: builder.CreateNumpyVector(v) for n, v in columns.items() if isinstance(v, np.ndarray)}
        more = builder.CreateNumpyVector(np.arange(9, dtype=np.uint64))
        count = len(RECORDS.fields)
        builder.StartObject(count + 3)
        for name, field in RECORDS.fields.items():
            if name in places:
                builder.PrependUOffsetTRelativeSlot(field.slot, places[name], 0)
            elif name in columns:
                builder.PrependUint64Slot(field.slot, columns[name], 0)
        builder.PrependUOffsetTRelativeSlot(count, more, 0)
        builder.PrependUint64Slot(count + 2, 99, 0)
        builder.Finish(builder.EndObject())
        return _newer(frame, bytes(builder.Output()))

    change(path, FrameKind.records, edit)
    assert read_all(path) == before
    check_capture(path)


def test_frames_of_known_kinds_with_unknown_flags_or_codecs_are_told_from_damage(capture: Path) -> None:

    for minor, error in ((4, UnsupportedVersion), (0, InvalidCapture)):
        for changes in ({"flags": 9}, {"codec": 2}):
            edited = {"minor": minor, **changes}
            change_header(capture, lambda h, e=edited: replace(h, **e), FrameKind.records, index=False)
            with pytest.raises(InvalidCapture) as caught:
                open_capture(capture)
            assert type(caught.value) is error
            capture.unlink()
            write_small(capture, frames=2)
    assert Codec.zstd == 1
