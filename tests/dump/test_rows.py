"""JSON lines: every row is what the record says, is as documented, and is read back without loss."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfmt.dump import row_templates
from replayfmt.dump.listings import signature_lines
from replayfmt.dump.row_templates import encode
from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks
from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import (
    DType,
    KernelKind,
    Layout,
    MemoryFormat,
    OpStatus,
    RecordKind,
    StorageOrigin,
    TensorFlag,
)
from replayfmt.format.codes import ValueKind as V
from replayfmt.format.model import (
    Device,
    ExternalFile,
    FileRange,
    Generator,
    Kernel,
    Node,
    Recipe,
    Signature,
    TensorMeta,
)
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.signature_layout import SlotLayout

from . import oracle
from .captures import HOSTILE, SESSION, STRIDED, Builder

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "rows.schema.json").read_text(encoding="utf-8"))
EVERYTHING = Selection()


def lines(reader: CaptureReader, selection: Selection = EVERYTHING) -> list[str]:
    return [line for chunk in jsonl_chunks(reader, selection) for line in chunk.splitlines()]


def rows(path: Path, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
    with open_capture(path) as reader:
        return [json.loads(line) for line in lines(reader, selection)]


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows(path) if row["kind"] == kind]


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of one kind of row, with the definitions it refers to."""
    return {**SCHEMA["$defs"][f"row_{kind}"], "$defs": SCHEMA["$defs"]}


def documented_keys(kind: str) -> list[str]:
    """The keys of a kind in the tables of rows.md."""
    text = (DOCS / "rows.md").read_text(encoding="utf-8")
    section = re.search(rf"^### `{kind}`$(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, kind
    return re.findall(r"^\| `(\w+)` \|", section[1], re.MULTILINE)


# --------------------------------------------------------------------------------------------- what the rows say


@pytest.mark.parametrize("name", ["every", "plain"])
def test_every_record_has_the_row_that_the_decoded_record_gives(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    with open_capture(path) as reader:
        fast = [row for row in map(json.loads, lines(reader)) if "ordinal" in row]
        slow = [oracle.row(reader, record) for record in reader.records()]
    assert fast == slow
    assert [list(row) for row in fast] == [list(row) for row in slow]
    assert [row["ordinal"] for row in fast] == list(range(len(slow)))


def test_the_capture_of_these_tests_has_every_kind_of_record_and_of_value(every: Path) -> None:
    found = rows(every)
    # Collectives are reserved and cannot be written yet.
    assert {kind.name for kind in RecordKind} - {row["kind"] for row in found} == {"none", "collective"}
    assert {"file", "summary", "session", "device", "kernel", "generator", "scope", "storage", "payload"} <= {
        row["kind"] for row in found
    }
    types = {argument["type"] for row in found if row["kind"] == "op" for argument in row["args"]}
    assert types == {kind.name for kind in V}


def test_rows_carry_the_keys_of_the_design_in_its_order(plain: Path) -> None:
    examples = {
        "file": "kind path version complete length",
        "summary": "kind hermetic environment_referenced strict_replay_supported ops kernels storages scopes payloads "
        "files file_bytes file_validation unsupported",
        "kernel": "kind id name overload schema calls",
        "storage": "kind id device bytes origin payload",
        "payload": "kind id bytes digest range",
        "op": "kind ordinal op overload kernel scope device thread status start_ns args results frame_offset",
        "scope_begin": "kind ordinal name",
    }
    for kind, keys in examples.items():
        row = of_kind(plain, kind)[0]
        assert [key for key in row if key in keys.split()] == keys.split()
    op = of_kind(plain, "op")[0]
    assert op["args"][0] == {
        "name": "self",
        "type": "tensor",
        "tensor": 1,
        "storage": 1,
        "dtype": "float32",
        "sizes": [4],
        "strides": [1],
        "offset": 0,
    }
    assert list(op["args"][0]) == ["name", "type", "tensor", "storage", "dtype", "sizes", "strides", "offset"]
    assert list(op["results"][0])[0] == "type"


@pytest.mark.slow
def test_definitions_say_what_the_capture_defines(every: Path) -> None:
    found = rows(every)
    assert [row["kind"] for row in found[:3]] == ["file", "summary", "session"]
    with open_capture(every) as reader:
        assert found[0] == {
            "kind": "file",
            "path": str(every),
            "version": "1.0",
            "complete": True,
            "length": every.stat().st_size,
            "incomplete_reason": None,
            "warnings": [],
        }
        session = found[2]
        assert session["created_unix_ns"] == str(SESSION.created_unix_ns)
        assert session["created"] == "2026-09-21T14:13:20Z"
        assert session["argv"] == ["train.py", "--steps", "2"]
        assert session["settings"] == SESSION.settings
        assert [row["name"] for row in of_kind(every, "kernel")][:2] == ["aten::mm", "test::every"]
        assert of_kind(every, "kernel")[0]["calls"] == 4
        payload = of_kind(every, "payload")[0]
        where = payload["range"]
        assert where["compression"] in ("none", "zstd")
        if where["compression"] == "none":
            assert every.read_bytes()[where["offset"] :][: where["length"]] == bytes(reader.payload(1))
    assert of_kind(every, "device")[1] == {
        "kind": "device",
        "id": 2,
        "device": "cuda:0",
        "type": "cuda",
        "index": 0,
        "name": "A GPU",
        "fingerprint": {"capability": [9, 0], "memory": 151397597184},
    }
    assert of_kind(every, "generator") == [{"kind": "generator", "id": 1, "device": "cpu", "default": True}]
    assert of_kind(every, "scope")[1] == {
        "kind": "scope",
        "id": 2,
        "name": "step 3",
        "path": "execute/step 3",
        "parent": 1,
    }
    assert of_kind(every, "storage") == [
        {"kind": "storage", "id": 1, "device": "cpu", "bytes": 4096, "origin": "payload", "payload": 1},
        {"kind": "storage", "id": 2, "device": "cpu", "bytes": 64, "origin": "absent", "payload": None},
        {"kind": "storage", "id": 3, "device": "cpu", "bytes": 1024, "origin": "op", "payload": None},
        {
            "kind": "storage",
            "id": 4,
            "device": "cpu",
            "bytes": 64,
            "origin": "external_file",
            "payload": None,
            "range": 1,
        },
        {
            "kind": "storage",
            "id": 5,
            "device": "cpu",
            "bytes": 5,
            "origin": "external_file",
            "payload": None,
            "range": 2,
        },
        {
            "kind": "storage",
            "id": 6,
            "device": "cpu",
            "bytes": 100,
            "origin": "initializer",
            "payload": None,
            "recipe": 1,
        },
    ]


def test_the_summary_says_what_speaks_against_a_strict_replay(every: Path, plain: Path) -> None:
    (summary,) = of_kind(plain, "summary")
    assert summary["strict_replay_supported"] and summary["hermetic"] and not summary["environment_referenced"]
    assert (summary["ops"], summary["kernels"], summary["storages"]) == (100, 2, 101)
    assert summary["scopes"] == {"begin": 1, "end": 1}
    assert summary["payloads"] == {"count": 1, "bytes": 16}
    assert summary["unsupported"] == {}
    (summary,) = of_kind(every, "summary")
    assert not summary["strict_replay_supported"]
    assert summary["absent_storages"] == 1
    assert summary["unsupported"]["compiled_region"] == 1
    assert sum(summary["unsupported"].values()) == summary["records"]["unsupported"] == 14


def one_obstacle(path: Path, obstacle: str) -> bool:
    """Whether a strict replay is supported of a capture that has only this against it."""
    b = Builder(path)
    cpu = b.writer.device(Device("cpu"))
    meta = b.writer.meta(TensorMeta(DType.float32, STRIDED, cpu, (4,), (1,)))
    kernel = b.writer.kernel(
        Kernel("test::op", "default", "", KernelKind.triton if obstacle == "triton" else KernelKind.operator)
    )
    origin = StorageOrigin.absent if obstacle == "absent" else StorageOrigin.op
    tensor = b.tensor(b.storage(16, cpu, origin), meta)
    argument = Node(V.opaque, "x", "a thing") if obstacle == "opaque" else Node(V.none, "x")
    b.record(Signature(RecordKind.op, (Node(V.tensor, "self"), argument), (), kernel, OpStatus.ok), [tensor])
    if obstacle == "unsupported":
        b.record(Signature(RecordKind.unsupported, tuple(Node(V.string, n, "?") for n in ("reason", "op", "detail"))))
    b.frame()
    if obstacle == "incomplete":
        b.writer.abandon()
        return bool(of_kind(Path(f"{path}.partial"), "summary")[0]["strict_replay_supported"])
    return bool(of_kind(b.close(), "summary")[0]["strict_replay_supported"])


@pytest.mark.parametrize("obstacle", ["", "opaque", "unsupported", "incomplete", "triton"])
def test_any_one_obstacle_makes_a_strict_replay_unsupported(obstacle: str, tmp_path: Path) -> None:
    assert one_obstacle(tmp_path / "one.opreplay", obstacle) == (not obstacle)


def test_content_that_was_not_captured_is_left_to_initializers(tmp_path: Path) -> None:
    assert one_obstacle(tmp_path / "one.opreplay", "absent")
    assert of_kind(tmp_path / "one.opreplay", "summary")[0]["absent_storages"] == 1


# ---------------------------------------------------------------------------------------------- as documented


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every", "plain"])
def test_every_row_of_a_dump_is_as_the_schema_says(name: str, request: pytest.FixtureRequest) -> None:
    for row in rows(request.getfixturevalue(name)):
        jsonschema.Draft202012Validator(schema_of(row["kind"])).validate(row)
        expected = [key for key in SCHEMA["$defs"][f"row_{row['kind']}"]["properties"] if key in row]
        assert list(row) == expected


@pytest.mark.parametrize("name", ["every", "plain"])
def test_every_signature_row_is_as_the_schema_says(name: str, request: pytest.FixtureRequest) -> None:
    with open_capture(request.getfixturevalue(name)) as reader:
        found = list(map(json.loads, "".join(signature_lines(reader, EVERYTHING)).splitlines()))
        assert sum(row["calls"] for row in found) == reader.summary.records[RecordKind.op]
    for row in found:
        jsonschema.Draft202012Validator(schema_of("signature")).validate(row)


@pytest.mark.slow
def test_the_schema_knows_every_kind_and_no_other() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    kinds = {reference["$ref"].removeprefix("#/$defs/row_") for reference in SCHEMA["oneOf"]}
    definitions = {
        "file",
        "summary",
        "session",
        "device",
        "kernel",
        "generator",
        "scope",
        "payload",
        "external_file",
        "range",
        "recipe",
        "attachment",
        "finding",
        "signature",
        "device_stream",
        "device_kernel",
        "storage",
    }
    assert kinds == definitions | {kind.name for kind in RecordKind if kind != RecordKind.none}
    for kind in kinds:
        assert documented_keys(kind) == list(SCHEMA["$defs"][f"row_{kind}"]["properties"])
    values = [option["properties"]["type"]["const"] for option in SCHEMA["$defs"]["argument"]["oneOf"]]
    assert sorted(values) == sorted(kind.name for kind in V)
    text = (DOCS / "rows.md").read_text(encoding="utf-8").partition("## Values")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    for option in SCHEMA["$defs"]["value"]["oneOf"]:
        properties = list(option["properties"])
        assert properties[0] == "type"
        assert re.findall(r"`(\w+)`", table[option["properties"]["type"]["const"]]) == properties[1:]


def test_the_schema_refuses_what_is_not_a_row() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid({"kind": "generator", "id": 1, "device": "cpu", "default": True})
    for wrong in (
        {"kind": "generator", "id": 0, "device": "cpu", "default": True},
        {"kind": "generator"},
        {"kind": "generator", "id": 1, "device": "cpu", "default": True, "more": 1},
        {"kind": "nothing"},
        3,
    ):
        assert not validator.is_valid(wrong)


# ------------------------------------------------------------------------------------------------ without loss


def test_numbers_that_json_parsers_would_bend_are_strings(every: Path) -> None:
    op = next(row for row in rows(every) if row.get("op") == "test::every")
    values = {argument["name"]: argument.get("value") for argument in op["args"]}
    assert values["large"] == "9223372036854775807" and values["smallest"] == "-9223372036854775808"
    assert values["small"] == 7
    assert values["sizes"][-2:] == [2**53, str(2**53 + 1)]
    assert (values["nan"], values["inf"], values["minus"]) == ("NaN", "Infinity", "-Infinity")
    assert math.copysign(1, values["ratios"][2]) == -1
    digest = of_kind(every, "digest")[0]
    assert digest["hash"] == f"{2**63 * 2**64 + 1:032x}"
    assert digest["sample"] == [str(2**60), -3]


def test_rows_are_plain_ascii_lines_of_one_strict_json_object_each(every: Path) -> None:
    with open_capture(every) as reader:
        text = "".join(jsonl_chunks(reader, EVERYTHING))
    assert text.isascii() and text.endswith("\n")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in text[:-1].split("\n"):
        assert isinstance(json.loads(line, parse_constant=refuse), dict)


def test_text_of_a_capture_stays_text_whatever_it_contains(every: Path) -> None:
    with open_capture(every) as reader:
        found = [json.loads(line) for line in lines(reader)]
    calls = [row for row in found if row["kind"] == "op" and row["op"] in HOSTILE]
    assert [row["op"] for row in calls] == HOSTILE
    for row, hostile in zip(calls, HOSTILE, strict=True):
        assert row["overload"] == hostile and row["scope"] == f"execute/step 3/{hostile}"
        first, second, opaque, group, composite, texts = row["args"]
        assert (first["name"], second["name"]) == (hostile, hostile + "2")
        assert second["value"] == opaque["value"] == group["value"] == composite["form"] == hostile
        assert texts["value"] == [hostile, hostile]
    assert not Path("injected").exists()


def test_a_lone_surrogate_does_not_make_a_row_that_strict_parsers_refuse() -> None:
    assert encode("a\ud800b \ud83d\ude00") == '"a\\ufffdb \\ud83d\\ude00"'
    assert encode({"\udcff": [1, None, True]}) == '{"\\ufffd":[1,null,true]}'


def test_a_device_fingerprint_that_is_no_json_is_shown_as_text(tmp_path: Path) -> None:
    b = Builder(tmp_path / "odd.opreplay")
    b.writer.device(Device("cuda", 0, "", "{broken"))
    b.writer.device(Device("cuda", 1, "", "[" * 100_000))
    b.writer.device(Device("cuda", 2, "", '{"memory": 1e999, "serial": 18446744073709551615}'))
    b.record(Signature(RecordKind.synchronize, (Node(V.device, "device", 1),)))
    b.frame()
    found = [row["fingerprint"] for row in of_kind(b.close(), "device")]
    assert found == ["{broken", "[" * 100_000, {"memory": "Infinity", "serial": "18446744073709551615"}]


# --------------------------------------------------------------------------------------------- any signature at all

CODES = {V.dtype: DType, V.layout: Layout, V.memory_format: MemoryFormat}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(HOSTILE)


def constants(kind: V) -> st.SearchStrategy[Any]:
    if kind == V.bool:
        return st.integers(0, 1)
    if kind in CODES:
        return st.sampled_from([int(code) for code in CODES[kind] if code])
    if kind == V.device:
        return st.just(1)
    return TEXTS if kind in (V.string, V.opaque, V.process_group) else st.none()


LEAVES = st.sampled_from([kind for kind in V if kind not in (V.list, V.tuple, V.composite)]).flatmap(
    lambda kind: st.builds(Node, st.just(kind), TEXTS, constants(kind))
)
NODES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.builds(
            Node, st.sampled_from([V.list, V.tuple]), TEXTS, st.none(), st.lists(children, max_size=4).map(tuple)
        ),
        st.builds(Node, st.just(V.composite), TEXTS, TEXTS, st.lists(children, max_size=3).map(tuple)),
        st.builds(lambda child, times: Node(V.list, "run", None, (child,) * times), LEAVES, st.integers(2, 5)),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data(), args=st.lists(NODES, max_size=5), results=st.lists(NODES, max_size=2))
def test_rows_of_any_signature_and_any_values_equal_the_slow_way(
    data: st.DataObject, args: list[Node], results: list[Node], tmp_path_factory: pytest.TempPathFactory
) -> None:
    b = Builder(tmp_path_factory.mktemp("any") / "any.opreplay")
    w = b.writer
    cpu = w.device(Device("cpu"))
    metas = [
        w.meta(TensorMeta(DType.float32, STRIDED, cpu, (2, 3), (3, 1))),
        w.meta(TensorMeta(DType.bool, Layout.sparse_csr, cpu, (), (), TensorFlag.neg)),
    ]
    storage, generator, payload = b.storage(64, cpu), w.generator(Generator(cpu, False)), w.payload(b"x")
    tensors = [b.tensor(storage, metas[0]), b.tensor(0, metas[1]), b.tensor(storage, metas[0], 2**54)]
    signature = Signature(RecordKind.op, tuple(args), tuple(results), w.kernel(Kernel("a::b", "c", "d")), OpStatus.ok)
    place = w.range(FileRange(w.file(ExternalFile("/a", 9)), 1, 2))
    fixed = {
        V.storage: storage,
        V.generator: generator,
        V.payload: payload,
        V.range: place,
        V.recipe: w.recipe(Recipe(DType.int8, 1, 1)),
    }
    notes = [0, w.annotation({"import": "exact"})]
    for _ in range(2):
        ints = [
            fixed[node.kind] if node.kind in fixed else data.draw(st.integers(-(2**63), 2**63 - 1))
            for node in signature.nodes
            if node.kind in fixed or node.kind == V.int
        ]
        drawn = [data.draw(st.floats()) for _ in range(SlotLayout(signature).slots[2])]
        b.record(
            signature,
            [data.draw(st.sampled_from(tensors)) for _ in range(SlotLayout(signature).slots[0])],
            ints,
            drawn,
            annotation=data.draw(st.sampled_from(notes)),
        )
    b.frame()
    with open_capture(b.close()) as reader:
        fast = [row for row in map(json.loads, lines(reader)) if "ordinal" in row]
        assert fast == [oracle.row(reader, record) for record in reader.records()]
        for row in fast:
            jsonschema.Draft202012Validator(schema_of("op")).validate(row)


def test_a_chunk_stays_bounded_however_long_the_rows_of_a_capture_are(
    every: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_capture(every) as reader:
        whole = "".join(jsonl_chunks(reader, EVERYTHING))
        monkeypatch.setattr(row_templates, "CHUNK_CHARACTERS", 100_000)
        monkeypatch.setattr(row_templates, "CACHE_CHARACTERS", 1000)
        chunks = [chunk for chunk in jsonl_chunks(reader, EVERYTHING) if '"ordinal"' in chunk]
        assert "".join(chunks).splitlines() == [line for line in whole.splitlines() if '"ordinal"' in line]
        monkeypatch.setattr(row_templates, "CHUNK_CHARACTERS", 10_000)
        with pytest.raises(InvalidCapture, match="limit is 10000"):
            list(jsonl_chunks(reader, EVERYTHING))
    assert len(chunks) > 5 and all(len(chunk) <= 100_000 for chunk in chunks)
    assert any(chunk.count("\n") > 1 for chunk in chunks)
