"""The schema is the source of every number: the codes, the layouts and the structs follow it."""

from __future__ import annotations

import ast
import inspect
import re
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from replayfmt.format import codes, definition_tables, flatbuffer_tables, frames

from .bindings import SCHEMA, bindings


def _blocks(kind: str) -> dict[str, str]:
    """Bodies of the schema's enums, structs or tables, without comments, by name."""
    text = re.sub(r"//[^\n]*", "", SCHEMA.read_text())
    return {name: body for name, body in re.findall(rf"{kind}\s+(\w+)[^{{]*\{{([^}}]*)\}}", text)}


def test_struct_sizes_are_frozen() -> None:
    def size(name: str) -> int:
        return getattr(bindings(name), name).SizeOf()

    assert frames.PREAMBLE.size == 64
    assert (size("FrameHeader"), frames.HEADER.size) == (64, 64)
    assert (size("FrameRow"), frames.FRAME_ROW.itemsize) == (48, 48)
    assert (size("PayloadRow"), frames.PAYLOAD_ROW.itemsize) == (48, 48)
    assert (size("Trailer"), frames.TRAILER.size) == (64, 64)


def test_structs_have_the_schemas_fields_in_order() -> None:
    formats = {"ulong": "Q", "uint": "I", "ushort": "H"}
    for name, packed in (("FrameHeader", frames.HEADER.format), ("Trailer", frames.TRAILER.format)):
        types = re.findall(r"\w+\s*:\s*(\w+)\s*;", _blocks("struct")[name])
        assert "<" + "".join(formats[kind] for kind in types) == packed
    for name, dtype in (("FrameRow", frames.FRAME_ROW), ("PayloadRow", frames.PAYLOAD_ROW)):
        fields = re.findall(r"(\w+)\s*:\s*(\w+)\s*;", _blocks("struct")[name])
        assert [(field, flatbuffer_tables.SCALARS[kind]) for field, kind in fields] == [
            (field, dtype.fields[field][0]) for field in dtype.names
        ]


def test_enumerations_are_the_schemas() -> None:
    for name, body in _blocks("enum").items():
        ours = getattr(codes, name)
        if issubclass(ours, IntFlag):
            names = re.findall(r"\w+", body)
            assert {flag: 1 << place for place, flag in enumerate(names)} == {f.name: int(f) for f in ours}
        else:
            assert issubclass(ours, IntEnum)
            assert {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)} == {
                member.name: int(member) for member in ours
            }


def test_table_layouts_are_the_schemas() -> None:
    blocks = _blocks("table")
    found = [layout for layout in vars(flatbuffer_tables).values() if isinstance(layout, flatbuffer_tables.TableLayout)]
    ours = {layout.name: layout for layout in (*found, definition_tables.TABLES)}
    assert set(ours) == set(blocks)
    for name, body in blocks.items():
        fields = re.findall(r"(\w+)\s*:\s*(\[?\w+\]?)\s*(?:=\s*(\d+))?\s*(\(required\))?\s*;", body)
        assert len(fields) == body.count(";")
        assert list(ours[name].fields) == [field for field, *_rest in fields]
        for slot, (field, kind, default, required) in enumerate(fields):
            found = ours[name].fields[field]
            assert (found.slot, found.type, found.default, found.required) == (
                slot,
                kind,
                int(default or 0),
                bool(required),
            )


def test_everything_is_little_endian() -> None:
    for packed in (frames.PREAMBLE, frames.HEADER, frames.TRAILER):
        assert packed.format.startswith("<")
    for dtype in (
        *flatbuffer_tables.SCALARS.values(),
        *(frames.FRAME_ROW[i] for i in range(len(frames.FRAME_ROW))),
        *(frames.PAYLOAD_ROW[i] for i in range(len(frames.PAYLOAD_ROW))),
    ):
        assert dtype.itemsize == 1 or dtype == dtype.newbyteorder("<")


@pytest.mark.slow
def test_nothing_in_a_capture_can_become_code() -> None:
    """No module of the format has a way to run, import or unpickle what it read."""
    forbidden = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "pickle",
        "marshal",
        "shelve",
        "importlib",
        "ctypes",
        "subprocess",
    }
    for path in Path(definition_tables.__file__).parent.rglob("*.py"):
        used: set[str | None] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                used.update(alias.name.split(".")[0] for alias in node.names)
                used.add(getattr(node, "module", None))
        assert not forbidden & used, str(path)


def test_magic_numbers_are_the_bytes_the_schema_says() -> None:
    assert frames.FRAME_MAGIC.to_bytes(4, "little") == b"OFRM"
    assert frames.TRAILER_MAGIC.to_bytes(8, "little") == b"OPRTRAIL"
    text = SCHEMA.read_text()
    assert "0x4d52464f" in text and "0x4c494152_5452504f" in text


def test_the_schemas_version_is_the_codes(tmp_path: Path) -> None:
    assert f"version {codes.MAJOR_VERSION}.{codes.MINOR_VERSION}:" in SCHEMA.read_text().splitlines()[0]


def test_the_columns_of_a_family_are_listed_in_its_module_alone() -> None:
    """A new column is one module to edit beside the schema."""
    folder = Path(definition_tables.__file__).parent
    words = {path: set(re.findall(r"\w+", path.read_text())) for path in folder.rglob("*.py")}
    for family in definition_tables.FAMILIES:
        listing = {path for path, found in words.items() if found.issuperset(family.columns)}
        assert listing == {Path(inspect.getfile(type(family)))}
