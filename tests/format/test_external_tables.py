"""Files, ranges, recipes and annotations: what is written is read, and what breaks a rule is refused on both sides."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfmt.errors import InvalidCapture, UnsupportedVersion
from replayfmt.format.codes import ITEM_BYTES, DType, FrameKind, RecordKind, StorageOrigin
from replayfmt.format.definition_tables import encode_tables
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.model import (
    Device,
    ExternalFile,
    FileIdentity,
    FileRange,
    RangeValue,
    Recipe,
    RecipeValue,
    Statistics,
)
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .reading import read_all, refused
from .reseal import Frame, Tables, change, change_records, change_tables, tables_of
from .samples import IMPORT_RANGE, IMPORT_RECIPE, SESSION, Records, marker

NAN = float("nan")


def _nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _level in range(depth - 1):
        inner = [inner]
    return inner


@pytest.fixture()
def writer(tmp_path: Path) -> CaptureWriter:
    return CaptureWriter(tmp_path / "a.opreplay", SESSION)


def test_files_ranges_and_recipes_come_back(capture: Path) -> None:
    with open_capture(capture) as reader:
        assert list(reader.files) == [
            None,
            ExternalFile(
                "/models/größer.safetensors",
                72000,
                FileIdentity(0xFD01, 1 << 60, 1_700_000_000_123_456_789),
                "00112233445566778899aabbccddeeff",
                4,
                "safetensors",
            ),
            ExternalFile("checkpoint.pt", 1 << 35, digest="ffeeddccbbaa99887766554433221100"),
            ExternalFile("/data/tokens.bin", 48),
        ]
        assert list(reader.file_ranges) == [
            None,
            FileRange(1, 4096, 512),
            FileRange(2, (1 << 34) + 5, 24, 1),
            FileRange(3, 48, 0),
        ]
        assert reader.recipes[1] == Recipe(
            DType.bfloat16, 100, 0xFFFFFFFFFFFFFFFF, Statistics(0.5, 1.25, -3.0, 1e30, 7, 2, 1, 0)
        )
        assert repr(reader.recipes[2]) == repr(Recipe(DType.int64, 0, 0, Statistics(NAN, NAN, NAN, NAN, 0, 0, 0, 0)))
        assert reader.recipes[3] == Recipe(DType.float32, 6, 3)
        assert len(reader.files) == len(reader.file_ranges) == len(reader.recipes) == 4


def test_imports_name_what_they_import(capture: Path) -> None:
    with open_capture(capture) as reader:
        imports = [record for record in reader.records() if record.kind == RecordKind.storage_import]
        assert [
            value
            for value in (record.argument("payload") for record in imports)
            if isinstance(value, RangeValue | RecipeValue)
        ] == [*map(RangeValue, (1, 2, 3)), *map(RecipeValue, (1, 2, 3))]


def test_an_annotation_comes_back_with_its_record_and_only_there(capture: Path) -> None:
    said = {"import": "inferred", "assumed": ["größer", "no strides"], "count": 3}
    with open_capture(capture) as reader:
        assert {record.ordinal: record.annotation for record in reader.records() if record.annotation} == {7: said}
        first, second = reader.frame(0), reader.frame(1)
        assert second.annotation is None and first.annotation is not None
        assert [reader.annotation(number) for number in first.annotation.tolist()] == [None] * 7 + [said]


def test_the_same_content_gets_the_same_id(writer: CaptureWriter) -> None:
    file = ExternalFile("/a", 8, FileIdentity(1, 2, 3))
    number = writer.file(file)
    assert number == writer.file(file) == 1 and writer.file(ExternalFile("/a", 8)) == 2
    assert writer.range(FileRange(1, 0, 8)) == writer.range(FileRange(1, 0, 8)) == 1
    assert writer.range(FileRange(1, 0, 7)) == 2
    noise = Recipe(DType.float32, 2, 5, Statistics(NAN, NAN, NAN, NAN, 0, 2, 0, 0))
    assert writer.recipe(noise) == writer.recipe(noise) == 1 and writer.recipe(Recipe(DType.float32, 2, 5)) == 2
    assert writer.annotation({"a": 1, "b": [None]}) == writer.annotation({"b": [None], "a": 1})
    writer.abandon()


def test_an_annotation_with_a_lone_surrogate_stays_json(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    records = Records(writer)
    records.add(
        marker(RecordKind.scope_begin, "x"),
        scope=writer.scope(0, "x"),
        annotation=writer.annotation({"path": "caf\udce9"}),
    )
    records.write()
    writer.close(1)
    check_capture(tmp_path / "a.opreplay")
    with open_capture(tmp_path / "a.opreplay") as reader:
        assert reader.record(0).annotation == {"path": "caf\udce9"}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda w: w.file(ExternalFile("", 1)), "the path ''"),
        (lambda w: w.file(ExternalFile("a\0b", 1)), "the path"),
        (lambda w: w.file(ExternalFile("caf\udce9", 1)), "not UTF-8"),
        (lambda w: w.file(ExternalFile("/a", -1)), "length of an external file is -1"),
        (lambda w: w.file(ExternalFile("/a", (1 << 60) + 1)), "length of an external file"),
        (lambda w: w.file(ExternalFile("/a", 1, FileIdentity(-1, 0, 0))), "device is -1"),
        (lambda w: w.file(ExternalFile("/a", 1, FileIdentity(0, 1 << 64, 0))), "inode is"),
        (lambda w: w.file(ExternalFile("/a", 1, FileIdentity(0, 0, 1 << 63))), "mtime_ns is"),
        (lambda w: w.file(ExternalFile("/a", 1, digest="ABC")), "32 hexadecimal digits"),
        (lambda w: w.file(ExternalFile("/a", 1, digest="A" * 32)), "32 hexadecimal digits"),
        (lambda w: w.file(ExternalFile("/a", 1, payload=9)), "payload 9 is not there"),
        (lambda w: w.file(ExternalFile("/a", 1, payload=1)), "/a has 1 bytes, its payload 3"),
        (lambda w: w.range(FileRange(2, 0, 1)), "file 2 is not defined"),
        (lambda w: w.range(FileRange(0, 0, 1)), "file 0 is not defined"),
        (lambda w: w.range(FileRange(1, 5, 4)), "a range of 4 bytes at 5 of file 1, which has 8"),
        (lambda w: w.range(FileRange(1, -1, 4)), "a range of 4 bytes at -1"),
        (lambda w: w.range(FileRange(1, 0, -4)), "a range of -4 bytes"),
        (lambda w: w.range(FileRange(1, 0, 4, 1)), "a range of 4 bytes with a payload of 3"),
        (lambda w: w.recipe(Recipe(DType.none, 1, 1)), "a recipe with the dtype"),
        (lambda w: w.recipe(Recipe(DType.int8, -1, 1)), "number of elements is -1"),
        (lambda w: w.recipe(Recipe(DType.int8, 1, 1 << 64)), "seed is"),
        (lambda w: w.recipe(Recipe(DType.int8, 1, 1, Statistics(0, 0, 0, 0, 2, 0, 0, 0))), "zeros is 2"),
        (lambda w: w.recipe(Recipe(DType.int8, 3, 1, Statistics(0, 0, 0, 0, 2, 2, 0, 0))), "special elements of 3"),
        (lambda w: w.annotation({}), "an annotation that is empty"),
        (lambda w: w.annotation({"a": _nested(65)}), "nested deeper than 64"),
        (lambda w: w.annotation({"a": NAN}), "not JSON"),
        (lambda w: w.annotation({"a": b"x"}), "not JSON"),
    ],
)
def test_the_writer_refuses_what_breaks_a_rule_and_goes_on(
    tmp_path: Path, writer: CaptureWriter, call: Callable[[CaptureWriter], Any], match: str
) -> None:
    writer.payload(b"abc")
    writer.file(ExternalFile("/eight", 8))
    with pytest.raises(ValueError, match=match):
        call(writer)
    writer.range(FileRange(1, 0, 8))
    writer.close(1)
    check_capture(tmp_path / "a.opreplay")
    with open_capture(tmp_path / "a.opreplay") as reader:
        assert (len(reader.files), len(reader.file_ranges), len(reader.recipes)) == (2, 2, 1)


@pytest.mark.parametrize(
    ("length", "origin", "number", "match"),
    [
        (
            8,
            StorageOrigin.external_file,
            0,
            "storage_payload holds 0..0 where the origin is external_file; allowed 1..1",
        ),
        (8, StorageOrigin.external_file, 2, "storage_payload holds 2..2 where the origin is external_file"),
        (9, StorageOrigin.external_file, 1, "a storage of 9 bytes comes from a range of 8"),
        (8, StorageOrigin.initializer, 0, "storage_payload holds 0..0 where the origin is initializer"),
        (8, StorageOrigin.initializer, 2, "storage_payload holds 2..2 where the origin is initializer"),
        (12, StorageOrigin.initializer, 1, "a storage of 12 bytes has room for 3 elements, its recipe has 2"),
        (7, StorageOrigin.initializer, 1, "a storage of 7 bytes has room for 1 elements, its recipe has 2"),
        (8, StorageOrigin.absent, 1, "have a payload exactly if"),
        (8, StorageOrigin.payload, 2, "storage_payload holds 2, allowed 0..1"),
    ],
)
def test_the_writer_refuses_a_storage_that_does_not_fit_its_content(
    writer: CaptureWriter, length: int, origin: StorageOrigin, number: int, match: str
) -> None:
    cpu = writer.device(Device("cpu"))
    writer.payload(b"abc")
    writer.file(ExternalFile("/eight", 8))
    writer.range(FileRange(1, 0, 8))
    writer.recipe(Recipe(DType.float32, 2, 0))
    records = Records(writer)
    records.storage(length, cpu, origin, number)
    records.add(marker(RecordKind.scope_begin, "x"), scope=writer.scope(0, "x"))
    with pytest.raises(ValueError, match=match):
        records.write()
    writer.abandon()


def test_an_annotation_that_is_not_there_is_refused(writer: CaptureWriter) -> None:
    records = Records(writer)
    records.add(marker(RecordKind.scope_begin, "x"), scope=writer.scope(0, "x"), annotation=999)
    with pytest.raises(ValueError, match="annotation holds 999..999"):
        records.write()
    writer.abandon()


# -------------------------------------------------------------------------------------- files made behind valid checks


def _column(name: str, row: int, value: float) -> Callable[[Tables], None]:
    def edit(tables: Tables) -> None:
        tables[1][name][row] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (_column("file_path", 0, 0), "file_path holds 0"),
        (_column("file_path", 0, 99999), "file_path holds"),
        (_column("file_format", 0, 99999), "file_format holds"),
        (_column("file_bytes", 0, 1 << 63), "file_bytes holds"),
        (_column("file_bytes", 0, 71999), "a file of 71999 bytes has payload 4, of 72000"),
        (_column("file_validation", 0, 4), "file_validation holds"),
        (_column("file_validation", 0, 2), "file_device of a file without identity is not 0"),
        (_column("file_validation", 0, 1), "file_digest_low of a file without digest is not 0"),
        (_column("file_digest_high", 2, 1), "file_digest_high of a file without digest is not 0"),
        (_column("file_mtime_ns", 1, -1), "file_mtime_ns of a file without identity is not 0"),
        (_column("file_payload", 0, 8), "file_payload holds 0..8, allowed 0..7"),
        (_column("range_file", 0, 0), "range_file holds 0"),
        (_column("range_file", 0, 4), "range_file holds 2..4, allowed 1..3"),
        (_column("range_offset", 2, 49), "a range ends at 49 of a file of 48 bytes"),
        (_column("range_offset", 0, (1 << 64) - 1), "range_offset holds"),
        (_column("range_bytes", 0, 1 << 62), "range_bytes holds"),
        (_column("range_payload", 0, 8), "range_payload holds"),
        (_column("range_payload", 0, 1), "a range of 512 bytes has payload 1, of 24"),
        (_column("recipe_dtype", 0, 0), "recipe_dtype holds 0"),
        (_column("recipe_dtype", 0, 47), "recipe_dtype holds"),
        (_column("recipe_elements", 0, (1 << 64) - 1), "recipe_elements holds"),
        (_column("recipe_elements", 0, 9), "statistics count more elements than it has"),
        (_column("recipe_zeros", 0, (1 << 64) - 1), "statistics count more elements than it has"),
        (_column("recipe_statistics", 0, 2), "recipe_statistics holds"),
        (_column("recipe_statistics", 0, 0), "recipe_mean of a recipe without statistics is not 0"),
        (_column("recipe_nans", 2, 1), "recipe_nans of a recipe without statistics is not 0"),
        (_column("recipe_min", 2, float("nan")), "recipe_min of a recipe without statistics is not 0"),
    ],
)
def test_definitions_that_break_a_rule_are_refused(capture: Path, edit: Callable[[Tables], None], match: str) -> None:
    change_tables(capture, edit)
    refused(capture, match)


def test_a_payload_must_come_before_the_file_or_range_that_names_it(capture: Path) -> None:
    def edit(tables: Tables) -> None:
        tables[1]["file_bytes"][2], tables[1]["file_payload"][2] = 5120, 7  # written after these definitions

    change_tables(capture, edit)
    with open_capture(capture) as reader:  # by the index, where every payload is known
        assert reader.files[3].payload == 7
    with pytest.raises(InvalidCapture, match=r"file_payload holds 0\.\.7, allowed 0\.\.6"):
        check_capture(capture)


def _put(name: str, row: int, value: int) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        columns[name][row] = value

    return edit


@pytest.mark.parametrize(
    ("which", "edit", "match"),
    [
        (1, _put("storage_payload", 1, 0), "storage_payload holds 0..3 where the origin is external_file"),
        (
            1,
            _put("storage_payload", 1, 4),
            "storage_payload holds 2..4 where the origin is external_file; allowed 1..3",
        ),
        (1, _put("storage_payload", 1, 2), "a storage of 512 bytes comes from a range of 24"),
        (1, _put("storage_bytes", 1, 511), "a storage of 511 bytes comes from a range of 512"),
        (1, _put("storage_payload", 4, 4), "where the origin is initializer; allowed 1..3"),
        (1, _put("storage_bytes", 4, 199), "has room for 99 elements, its recipe has 100"),
        (1, _put("storage_origin", 1, int(StorageOrigin.absent)), "have a payload exactly if"),
        (0, _put("annotation", 0, 1 << 31), "annotation holds"),
        (0, lambda columns: columns.update(annotation=columns["annotation"][:-1]), "column annotation has 7 rows"),
    ],
)
def test_records_that_break_a_rule_are_refused(
    capture: Path, which: int, edit: Callable[[dict], None], match: str
) -> None:
    change_records(capture, edit, which)
    refused(capture, match)


@pytest.mark.parametrize(("place", "match"), [(6, "refers to range"), (7, "refers to recipe")])
def test_references_to_what_is_not_there_are_refused(capture: Path, place: int, match: str) -> None:
    with open_capture(capture) as reader:
        frame = reader.frame(0)
        first = int(frame.int_first[6])  # the op with every kind of value
        assert frame.ints[first + 5 : first + 7].tolist() == [1, 3]
    for value in (0, 4, -1, 1 << 40):
        change_records(capture, _put("ints", first + place - 1, value), 0)
        refused(capture, f"{match} {value}; there are 3")


def test_an_annotation_that_is_no_object_is_a_finding(capture: Path) -> None:
    with open_capture(capture) as reader:
        text = reader.strings.index("größer") if "größer" in reader.strings else 1
    change_records(capture, _put("annotation", 0, text), 0)
    with pytest.raises(InvalidCapture, match=rf"annotation {text} is not JSON"):
        check_capture(capture)
    with open_capture(capture) as reader, pytest.raises(InvalidCapture, match="is not JSON"):
        list(reader.records())


def test_a_recovered_capture_keeps_files_and_recipes(tmp_path: Path, capture: Path) -> None:
    whole = read_all(capture)
    cut = tmp_path / "cut.opreplay"
    cut.write_bytes(capture.read_bytes()[:-64])
    recover_capture(cut, tmp_path / "out.opreplay")
    found = read_all(tmp_path / "out.opreplay")
    assert found[1] == whole[1] and all(
        found[2][name] == whole[2][name] for name in ("files", "file_ranges", "recipes")
    )


# -------------------------------------------------------------------------------------------------------- properties

u64 = st.integers(0, (1 << 64) - 1)
identities = st.none() | st.builds(FileIdentity, u64, u64, st.integers(-(1 << 63), (1 << 63) - 1))
digests = st.none() | st.integers(0, (1 << 128) - 1).map("{:032x}".format)
paths = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
contents = st.binary(max_size=40)
moments = st.floats()
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    counts = [draw(st.integers(0, 50)) for _ in range(4)]
    elements = sum(counts) + draw(st.integers(0, 100))
    known = Statistics(*[draw(moments) for _ in range(4)], *counts) if draw(st.booleans()) else None
    return Recipe(draw(st.sampled_from(list(DType)[1:])), elements, draw(u64), known)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_any_files_ranges_recipes_and_annotations_come_back(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.opreplay"
        writer = CaptureWriter(path, SESSION)
        cpu = writer.device(Device("cpu"))
        records = Records(writer)
        scope = writer.scope(0, "x")
        expected: list[tuple[Any, ...]] = []
        for _frame in range(data.draw(st.integers(1, 3))):
            for _row in range(data.draw(st.integers(1, 3))):
                inside = data.draw(st.none() | contents)
                length = data.draw(st.integers(0, 1 << 60)) if inside is None else len(inside)
                file = ExternalFile(
                    data.draw(paths),
                    length,
                    data.draw(identities),
                    data.draw(digests),
                    0 if inside is None else writer.payload(inside),
                    data.draw(st.sampled_from(("", "raw", "torch"))),
                )
                begin = data.draw(st.integers(0, length))
                place = FileRange(writer.file(file), begin, data.draw(st.integers(0, length - begin)))
                recipe = data.draw(recipes())
                number, other = writer.range(place), writer.recipe(recipe)
                note = data.draw(st.none() | st.dictionaries(st.text(max_size=4), json_values, min_size=1, max_size=3))
                from_file = records.storage(place.bytes, cpu, StorageOrigin.external_file, number)
                size = ITEM_BYTES[recipe.dtype]
                rest = data.draw(st.integers(0, size - 1))
                made = records.storage(recipe.elements * size + rest, cpu, StorageOrigin.initializer, other)
                records.add(
                    IMPORT_RANGE,
                    ints=(from_file, number, 0),
                    scope=scope,
                    annotation=writer.annotation(note) if note else 0,
                )
                records.add(IMPORT_RECIPE, ints=(made, other, 0), scope=scope)
                expected.append((file, place, recipe, note))
            records.write()
        writer.close(1)
        check_capture(path)
        with open_capture(path) as reader:
            found = list(reader.records())
            assert len(found) == 2 * len(expected)
            for index, (file, place, recipe, note) in enumerate(expected):
                first, second = found[2 * index : 2 * index + 2]
                assert reader.file_ranges[first.args[1].id] == place and reader.files[place.file] == file
                assert repr(reader.recipes[second.args[1].id]) == repr(recipe)
                assert (first.annotation, second.annotation) == (note, None)
                assert reader.storage(first.args[0].id).payload == first.args[1].id
            assert reader.summary == replace(reader.recount(), ended_ns=1)


@pytest.mark.parametrize(("name", "value"), [("file_validation", 4), ("recipe_dtype", 47)])
def test_codes_of_a_newer_minor_version_are_told_from_damage(capture: Path, name: str, value: int) -> None:
    def edit(frame: Frame) -> Frame:
        tables = tables_of(frame.body)
        tables[1][name][0] = value
        return replace(frame, header=replace(frame.header, minor=4), body=bytes(encode_tables(*tables)))

    change(capture, FrameKind.tables, lambda frame: None, which=-1)
    change(capture, FrameKind.tables, edit)
    with pytest.raises(UnsupportedVersion, match=rf"{name} holds {value}, from format version 1\.4; this reader knows"):
        open_capture(capture)
