"""FORMAT.md says what the code does: its tables of codes, its limits, and its example, which is a whole capture."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from replayfmt.format import codes, frames
from replayfmt.format.codes import FrameKind, RecordKind, ValueKind
from replayfmt.format.frames import FRAME_ROW, HEADER_BYTES, PAYLOAD_ROW, align, parse_header, parse_trailer
from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import open_capture
from replayfmt.format.signature_layout import ARGUMENTS, CODE_CONSTANTS, DIGEST_ARGUMENTS, SLOTS, TEXT_CONSTANTS

TEXT = (Path(__file__).parents[2] / "schema" / "FORMAT.md").read_text()


def _tables() -> dict[str, list[list[str]]]:
    """Every table of the page by its first column's heading, as rows of cells; tables of one heading are joined."""
    tables: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        tables.setdefault(rows[0][0], []).extend(rows[2:])
    return tables


TABLES = _tables()


@pytest.mark.parametrize(
    "name",
    [
        "FrameKind",
        "Codec",
        "RecordKind",
        "ValueKind",
        "KernelKind",
        "OpStatus",
        "StorageOrigin",
        "TensorFlag",
        "Layout",
        "MemoryFormat",
        "DType",
        "FileValidation",
    ],
)
def test_tables_of_codes_are_the_codes(name: str) -> None:
    listed = {row[1]: int(row[0]) for row in TABLES[name]}
    ours = {member.name: int(member) for member in getattr(codes, name)}
    if name in ("FrameKind", "RecordKind"):
        del ours["none"]  # never in a file
    assert listed == ours


def test_required_frames_are_those_the_table_calls_so() -> None:
    assert {FrameKind[row[1]] for row in TABLES["FrameKind"] if row[2] == "yes"} == frames.REQUIRED_KINDS


def test_the_slots_and_constants_of_values_are_the_codes() -> None:
    for number, name, constant, slots, *_meaning in TABLES["ValueKind"]:
        kind = ValueKind(int(number))
        columns = [0, 0, 0]
        if slots:
            count, column = slots.rstrip("s").split()
            columns[("tensor", "int", "float").index(column)] = int(count)
        assert tuple(columns) == SLOTS.get(kind, (0, 0, 0)), name
        expected = (
            "string id"
            if kind in TEXT_CONSTANTS
            else kind.name.replace("_", "")
            if kind in CODE_CONSTANTS
            else {ValueKind.bool: "0 or 1", ValueKind.device: "device id"}.get(kind, "")
        )
        assert constant.lower() == expected, name


def test_the_arguments_of_records_are_the_ones_that_are_required() -> None:
    for number, _name, arguments in TABLES["RecordKind"]:
        fixed = ARGUMENTS.get(RecordKind(int(number)), ())
        listed = re.findall(r"`(\w+)` (\w+(?: or \w+)*)", arguments)
        assert [(n, set(kinds.split(" or "))) for n, kinds in listed] == [
            (n, {kind.name for kind in kinds}) for n, kinds in fixed
        ]
    digest = re.search(r"\*\*A digest\*\* is (.*?)\. The hash", TEXT)
    assert digest and re.findall(r"`(\w+)`", digest[1]) == [name for name, _kinds in DIGEST_ARGUMENTS]


def test_the_limits_are_the_codes() -> None:
    limits = {row[0]: row[1] for row in TABLES["what"]}
    body = limits["body of a head, tables, records or summary frame, decompressed"]
    assert body == f"{frames.MAX_BODY_BYTES >> 20} MiB"
    assert limits["the same body, relative to its stored size"] == (
        f"{frames.FREE_FRAME_BYTES >> 20} MiB, plus {frames.MAX_EXPANSION} bytes for each stored byte"
    )
    (definitions,) = (limit for what, limit in limits.items() if what.startswith("bodies of all tables frames"))
    assert definitions == (
        f"{frames.FREE_DEFINITION_BYTES >> 20} MiB, plus {frames.MAX_EXPANSION} bytes for each stored byte"
    )
    assert limits["payload with codec zstd, decompressed"] == f"{frames.MAX_COMPRESSED_PAYLOAD_BYTES >> 20} MiB"
    assert limits["one string"] == f"{frames.MAX_STRING_BYTES >> 20} MiB"
    assert limits["records per frame"] == f"2^{frames.MAX_FRAME_RECORDS.bit_length() - 1}"
    assert limits["nesting of values, annotations and metadata"] == str(frames.MAX_NESTING)
    assert limits["attachments of one kernel"] == str(frames.MAX_ATTACHMENTS)
    assert limits["any length, offset, time, ordinal, size or stride"] == f"2^{frames.MAX_LENGTH.bit_length() - 1}"


def test_struct_tables_add_up() -> None:
    """Preamble, frame header, payload row and trailer: fields without holes, up to the struct's size."""
    sizes = []
    end = 0
    for offset, count, *_rest in TABLES["offset"]:
        if int(offset) == 0 and end:
            sizes.append(end)
            end = 0
        assert int(offset) == end
        end += int(count)
    assert [*sizes, end] == [64, 64, PAYLOAD_ROW.itemsize, 64]
    assert f"one `FrameRow` ({FRAME_ROW.itemsize} bytes)" in TEXT


def test_setting_names_and_composite_forms_are_those_in_use() -> None:
    from replayfmt.pytorch.environment import SETTINGS, autocast_devices
    from replayfmt.pytorch.tensors.composites import FORMS

    named = {name for row in TABLES["setting"] for name in re.findall(r"`([\w.]+)`", row[0])}
    for setting in (*SETTINGS, *(f"autocast.{device}" for device in autocast_devices())):
        general = re.sub(r"^fp32_precision\.\w+\.\w+$", "fp32_precision.BACKEND.OPERATION", setting)
        assert re.sub(r"^autocast\.\w+$", "autocast.DEVICE", general) in named
    assert [row[0].strip("`") for row in TABLES["form"]] == list(FORMS)


# ------------------------------------------------------------------------------------------------------- the example


def _example() -> bytes:
    block = re.search(r"```hex\n(.*?)```", TEXT, re.DOTALL)
    assert block
    data, repeat = bytearray(), b""
    for line in block[1].splitlines():
        if line == "*":
            repeat = bytes(data[-16:])
            continue
        offset = int(line[:8], 16)
        while len(data) < offset:
            assert repeat
            data += repeat
        assert len(data) == offset
        line_bytes = bytes.fromhex(line[8:].split("|")[0])
        data += line_bytes
        if line_bytes:
            assert line.split("|", 1)[1] == "".join(chr(b) if 32 <= b < 127 else "." for b in line_bytes) + "|"
    return bytes(data)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "example.opreplay"
    path.write_bytes(_example())
    return path


def test_the_example_is_a_valid_capture_that_says_what_the_page_says(example: Path) -> None:
    check_capture(example)
    with open_capture(example) as reader:
        assert reader.complete and reader.warnings == []
        assert [(r.kind, r.argument("name"), r.start_ns) for r in reader.records()] == [
            (RecordKind.scope_begin, "execute", 1000),
            (RecordKind.scope_end, "execute", 2500),
        ]
        assert reader.summary.ended_ns == 3000


def test_the_examples_tables_are_its_bytes(example: Path) -> None:
    data = example.read_bytes()
    rows = [row for row in TABLES["at"] if row[1].isdigit()]
    assert len(rows) == 8 + 12 + 9
    for at, count, field, value in rows:
        raw = data[int(at, 16) : int(at, 16) + int(count)]
        if field == "session":
            assert str(uuid.UUID(bytes=raw)) == value.strip("`")
        elif value.startswith("`"):
            assert raw == value.strip("`").encode()
        else:
            assert int.from_bytes(raw, "little") == int(value, 0), (at, field)
    assert int(rows[7][3], 0) == xxh3_64_intdigest(data[:56])
    assert int(rows[12][3], 0) == xxh3_64_intdigest(data[64:76] + data[80:128]) & 0xFFFFFFFF
    assert int(rows[19][3], 0) == xxh3_128_intdigest(data[128 : 128 + 164])
    assert int(rows[28][3], 0) == xxh3_64_intdigest(data[-64:-8])
    parse_trailer(data[-64:], len(data), "example")
    frames_listed = [row for row in TABLES["at"] if not row[1].isdigit()]
    offset = 64
    for at, kind, stored, first, count in frames_listed:
        assert offset == int(at, 16)
        header = parse_header(data[offset : offset + HEADER_BYTES], "example")
        assert (header.name, header.stored_bytes, header.first_ordinal, header.count) == (
            kind,
            int(stored),
            int(first),
            int(count),
        )
        offset += HEADER_BYTES + align(header.stored_bytes)
    assert offset == len(data) - 64
