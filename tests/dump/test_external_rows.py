"""External files, recipes, annotations, and what a capture contains: rows and text say what is so, found by looking."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfmt.dump.contents import Contained, state, statement
from replayfmt.dump.definitions import SHOWN_LINE
from replayfmt.dump.row_templates import encode, encode_fast
from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks, text_chunks
from replayfmt.format.codes import DType, OpStatus, RecordKind, StorageOrigin
from replayfmt.format.codes import ValueKind as V
from replayfmt.format.model import (
    CaptureInfo,
    Device,
    ExternalFile,
    FileIdentity,
    FileRange,
    Kernel,
    Node,
    Recipe,
    Signature,
    Statistics,
    TensorDigest,
    TensorMeta,
)
from replayfmt.format.reader import open_capture

from .captures import HOSTILE, SESSION, STRIDED, Builder
from .oracle import exact

USERS = "/" + "Users"  # in two pieces: no file of the project names a home
ANONYMOUS = CaptureInfo(SESSION.session_id, "opreplay", "0.1.0")


def rows(path: Path, kind: str) -> list[dict[str, Any]]:
    with open_capture(path) as reader:
        found = map(json.loads, "".join(jsonl_chunks(reader, Selection())).splitlines())
        return [row for row in found if row["kind"] == kind]


def summary(path: Path) -> dict[str, Any]:
    return rows(path, "summary")[0]


def text(path: Path) -> str:
    with open_capture(path) as reader:
        return "".join(text_chunks(reader, Selection(), summary_only=True))


def _imported(b: Builder, cpu: int, origin: StorageOrigin, number: int, size: int) -> None:
    kind = V.range if origin == StorageOrigin.external_file else V.recipe
    b.record(
        Signature(
            RecordKind.storage_import,
            (
                Node(V.storage, "storage"),
                Node(kind, "payload"),
                Node(V.int, "version"),
                Node(V.string, "reason", "first_use"),
            ),
        ),
        ints=[b.storage(size, cpu, origin, number), number, 0],
    )


def _with_files(path: Path, *files: tuple[ExternalFile, list[tuple[int, int, bytes | None]]]) -> Path:
    """A capture that uses these ranges (offset, length, content where it is embedded) of these files."""
    b = Builder(path, ANONYMOUS)
    cpu = b.writer.device(Device("cpu"))
    for file, places in files:
        number = b.writer.file(file)
        for offset, length, content in places:
            payload = b.writer.payload(content) if content is not None else 0
            place = b.writer.range(FileRange(number, offset, length, payload))
            _imported(b, cpu, StorageOrigin.external_file, place, length)
    b.record(Signature(RecordKind.synchronize, (Node(V.device, "device", cpu),)))
    b.frame()
    return b.close()


DIGEST = "0" * 32


def test_rows_of_files_ranges_and_recipes_say_what_the_capture_says(every: Path) -> None:
    assert rows(every, "external_file") == [
        {
            "kind": "external_file",
            "id": 1,
            "path": "/nowhere/model.safetensors",
            "bytes": str(2**54),
            "where": "external",
            "validation": "digest",
            "digest": "00112233445566778899aabbccddeeff",
            "identity": {"device": str(2**63), "inode": "7", "mtime_ns": "-5"},
            "payload": None,
            "format": "safetensors",
            "state": "missing",
        },
        {
            "kind": "external_file",
            "id": 2,
            "path": "tokens.bin",
            "bytes": len(HOSTILE[0]),
            "where": "inline",
            "validation": "none",
            "digest": None,
            "identity": None,
            "payload": 3,
            "format": None,
            "state": "missing",
        },
    ]
    assert rows(every, "range") == [
        {"kind": "range", "id": 1, "file": 1, "offset": str(2**53 + 1), "bytes": 64, "payload": None},
        {"kind": "range", "id": 2, "file": 2, "offset": 3, "bytes": 5, "payload": None},
    ]
    assert rows(every, "recipe") == [
        {
            "kind": "recipe",
            "id": 1,
            "dtype": "bfloat16",
            "elements": 50,
            "seed": str(2**64 - 1),
            "statistics": {
                "mean": 0.5,
                "std": 1.25,
                "min": "-Infinity",
                "max": "NaN",
                "zeros": 7,
                "nans": 2,
                "positive_infinities": 1,
                "negative_infinities": 0,
            },
        }
    ]


def test_an_import_names_its_range_or_recipe_and_no_payload(every: Path) -> None:
    imports = rows(every, "storage_import")
    assert [(row["payload"], row.get("range"), row.get("recipe")) for row in imports] == [
        (1, None, None),
        (None, None, None),
        (None, 1, None),
        (None, 2, None),
        (None, None, 1),
    ]
    assert "range" not in imports[0] and "recipe" not in imports[2]


def test_only_records_with_an_annotation_show_one(every: Path) -> None:
    with open_capture(every) as reader:
        said = {record.ordinal for record in reader.records() if record.annotation}
        found = list(map(json.loads, "".join(jsonl_chunks(reader, Selection())).splitlines()))
    assert {row["ordinal"] for row in found if "annotation" in row} == said and len(said) == 3
    row = next(row for row in found if "annotation" in row)
    assert row["annotation"] == {
        "assumed": HOSTILE,
        "count": 3,
        "large": str(2**70),
        "deep": {"x": [1.5, None]},
        "import": "inferred",
    }
    assert list(row)[-2:] == ["annotation", "frame_offset"]
    assert summary(every)["annotated"] == 3


def test_text_shows_annotations_on_one_line_that_cannot_steer_a_terminal(every: Path) -> None:
    with open_capture(every) as reader:
        lines = "".join(text_chunks(reader, Selection())).rpartition("\n\n")[2].splitlines()
    noted = [line for line in lines if "  # " in line]
    assert len(noted) == 3 and all(len(line.partition("  # ")[2]) <= 80 for line in noted)
    assert noted[0].endswith("…") and all(line.isprintable() for line in noted)
    assert any("[storage_import] storage 6, recipe 1, version=0, reason='first_use'" in line for line in lines)


# ------------------------------------------------------------------------------------------------------- the summary


@pytest.mark.parametrize(
    ("file", "places", "where", "hermetic"),
    [
        (ExternalFile("/a", 100, digest=DIGEST), [(0, 10, None)], "external", False),
        (ExternalFile("/a", 100, digest=DIGEST), [(0, 10, b"0123456789"), (10, 5, None)], "external", False),
        (ExternalFile("/a", 100, digest=DIGEST), [(0, 10, b"0123456789")], "ranges", True),
        (ExternalFile("/a", 100, digest=DIGEST), [(100, 0, None)], "ranges", True),
        (ExternalFile("/a", 100, digest=DIGEST), [], "unknown", True),
    ],
)
def test_whether_a_replay_needs_a_file_follows_from_what_is_embedded(
    tmp_path: Path, file: ExternalFile, places: list[tuple[int, int, bytes | None]], where: str, hermetic: bool
) -> None:
    path = _with_files(tmp_path / "a.opreplay", (file, places))
    found = summary(path)
    assert (found["hermetic"], found["environment_referenced"]) == (hermetic, True)
    assert found["files"] == {name: int(name == where) for name in ("external", "inline", "ranges", "unknown")}
    assert found["file_bytes"] == {
        "external": 100 * (where == "external"),
        "inline": 0,
        "ranges": sum(length for _o, length, content in places if content),
    }
    assert found["file_validation"] == {"identity": 0, "digest": 1, "none": 0, "unknown": 0}
    assert rows(path, "external_file")[0]["where"] == where
    assert found["strict_replay_supported"]
    assert found["origins"]["external_file"] == len(places)


def test_a_file_that_is_embedded_whole_is_not_needed(tmp_path: Path) -> None:
    b = Builder(tmp_path / "a.opreplay", ANONYMOUS)
    cpu = b.writer.device(Device("cpu"))
    number = b.writer.file(ExternalFile("/a", 4, payload=b.writer.payload(b"abcd")))
    _imported(b, cpu, StorageOrigin.external_file, b.writer.range(FileRange(number, 1, 2)), 2)
    b.frame()
    found = summary(b.close())
    assert found["hermetic"] and found["strict_replay_supported"]
    assert (found["files"]["inline"], found["file_bytes"]["inline"]) == (1, 4)


def test_a_needed_file_that_nothing_can_confirm_is_against_a_strict_replay(tmp_path: Path) -> None:
    path = _with_files(tmp_path / "a.opreplay", (ExternalFile("/a", 100), [(0, 10, None)]))
    assert not summary(path)["strict_replay_supported"]
    assert "refused: external files that cannot be validated" in text(path)
    path = _with_files(tmp_path / "b.opreplay", (ExternalFile("/a", 100), [(0, 2, b"ab")]))
    assert summary(path)["strict_replay_supported"]


def test_a_capture_without_files_says_so(plain: Path) -> None:
    found = summary(plain)
    assert found["hermetic"] and not found["environment_referenced"]
    assert sum(found["files"].values()) == sum(found["file_bytes"].values()) == 0
    assert found["origins"] == {
        "op": 100,
        "uninitialized": 0,
        "payload": 1,
        "absent": 0,
        "external_file": 0,
        "initializer": 0,
    }
    assert not re.search("^file needed", text(plain), re.MULTILINE)


def test_text_lists_the_files_and_what_is_there_now(tmp_path: Path) -> None:
    model = tmp_path / "model.bin"
    model.write_bytes(bytes(100))
    status = model.stat()
    identity = FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)
    path = _with_files(
        tmp_path / "a.opreplay",
        (ExternalFile(str(model), 100, identity), [(0, 10, None)]),
        (ExternalFile("/gone\nagain", 5, digest=DIGEST), [(0, 5, b"01234")]),
        *((ExternalFile(f"/{number}", number), []) for number in range(20)),
    )
    shown = text(path)
    assert f"file needed   {model}, 100 bytes, validated by identity, same\n" in shown
    assert "file          /gone\\nagain, 5 bytes, validated by digest, what is used of it is embedded\n" in shown
    assert "files         12 more\n" in shown
    model.unlink()
    assert "validated by identity, missing" in text(path)


def test_the_state_of_a_file_is_what_its_name_and_status_say(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(100))
    status = path.stat()
    file = ExternalFile(str(path), 100, FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns))
    assert state(file) == "same"
    assert state(replace(file, digest=DIGEST)) == state(replace(file, identity=None)) == "unverified"
    assert state(replace(file, bytes=99)) == "different" and state(replace(file, path=str(tmp_path))) == "different"
    os.utime(path, ns=(0, 1))
    assert state(file) == "different"
    assert state(replace(file, path=str(path) + "/x")) == "unreadable"
    path.unlink()
    assert state(file) == "missing"


# -------------------------------------------------------------------------------------------- what a capture contains


def test_a_capture_without_anything_telling_says_that(tmp_path: Path) -> None:
    b = Builder(tmp_path / "a.opreplay", ANONYMOUS)
    cpu = b.writer.device(Device("cpu"))
    b.record(Signature(RecordKind.synchronize, (Node(V.device, "device", cpu),)))
    b.frame()
    path = b.close()
    contains = summary(path)["contains"]
    assert not any(contains.values()) and contains["host_name"] is False and contains["digests"] == 0
    shown = text(path)
    assert not re.search("^contains ", shown, re.MULTILINE)
    assert (
        "lacks         content, digests, values of results, statistics, strings as arguments, paths of external "
        "files, other absolute paths, host name, user name, working directory, command line, stack information\n"
    ) in shown


def test_each_thing_is_found_where_it_is_whatever_the_policies_say(tmp_path: Path) -> None:
    session = replace(
        SESSION, policies={"payload": "none", "digests": "none", "redact": True}, working_directory=f"{USERS}/alice/src"
    )
    b = Builder(tmp_path / "a.opreplay", session)
    w = b.writer
    cpu = w.device(Device("cpu"))
    meta = w.meta(TensorMeta(DType.float32, STRIDED, cpu, (4,), (1,)))
    tensor = b.tensor(b.storage(16, cpu, StorageOrigin.payload, w.payload(bytes(16))), meta)
    item = w.kernel(Kernel("aten::item", "default", "aten::item(Tensor self) -> Scalar"))
    for _ in range(3):
        b.record(
            Signature(RecordKind.op, (Node(V.tensor, "self"),), (Node(V.float),), item, OpStatus.ok),
            [tensor],
            floats=[1.5],
        )
    einsum = w.kernel(Kernel("aten::einsum", "default", "aten::einsum(str equation, Tensor[] tensors) -> Tensor"))
    for equation in ("ij,jk->ik", "ij,jk->ik", f"{USERS}/bob/secret plan"):
        b.record(
            Signature(
                RecordKind.op,
                (Node(V.string, "equation", equation), Node(V.opaque, "what", "an object")),
                (Node(V.tensor),),
                einsum,
                OpStatus.ok,
            ),
            [tensor],
        )
    _imported(
        b,
        cpu,
        StorageOrigin.initializer,
        w.recipe(Recipe(DType.float32, 4, 1, Statistics(0, 1, -1, 1, 0, 0, 0, 0))),
        16,
    )
    digest = TensorDigest(1, 2, 4, 0, 0, 0.0, 1.0, 0.5, 1.0, (0.0, 1.0, 0.5, 0.5))
    ints, floats = digest.slots()
    live = (Node(V.tensor, "tensor"), Node(V.int, "of"), Node(V.int, "result"), *digest.nodes())
    b.record(Signature(RecordKind.digest, live), [tensor], [-1, -1, *ints], floats)
    b.record(Signature(RecordKind.host_read, (Node(V.string, "method", "tolist"), Node(V.tensor, "tensor"))), [tensor])
    b.record(
        Signature(
            RecordKind.unsupported,
            (
                Node(V.string, "reason", "host_call"),
                Node(V.string, "op", "f"),
                Node(V.string, "detail", 'File "/srv/train.py", line 3, in f'),
            ),
        ),
        scope=w.scope(0, "step"),
        annotation=w.annotation({"assumed": ["called at model.py:17"]}),
    )
    w.file(ExternalFile("/data/a.bin", 5)), w.file(ExternalFile("/data/b.bin", 5))
    b.frame()
    path = b.close()
    assert summary(path)["contains"] == {
        "content_bytes": 16,
        "digests": 1,
        "scalar_results": 3,
        "recipe_statistics": 1,
        "argument_strings": 2,
        "opaque_descriptions": 1,
        "scope_names": 1,
        "external_file_paths": 2,
        "other_paths": 3,
        "stacks": 2,
        "host_name": True,
        "user_names": ["alice", "bob"],
        "working_directory": True,
        "command_line": True,
        "code_bytes": 0,
        "code_sources": 0,
    }
    shown = re.search("^contains +(.*)$", text(path), re.MULTILINE)
    assert shown is not None
    for part in (
        "16 bytes of content",
        "1 digest of content",
        "values that 3 ops returned",
        "statistics of 1 tensor",
        "2 strings as arguments",
        "1 description of other arguments",
        "2 paths of external files",
        "3 texts with absolute paths",
        "host name",
        "user names (alice, bob)",
        "working directory",
        "command line",
        "2 texts with stack information",
    ):
        assert part in shown[1]
    assert not re.search("^lacks ", text(path), re.MULTILINE)


def test_the_statement_is_never_cut_whatever_a_capture_says(tmp_path: Path) -> None:
    most = 10**15
    found = Contained(*[most] * 10, True, tuple(f"{number}" * 500 for number in range(9)), True, True, most, most)
    has, lacks = statement(found)
    assert len(has) < SHOWN_LINE and has.endswith("command line, 1,000,000,000,000,000 texts with stack information")
    assert lacks == "" and len(statement(Contained(*[0] * 10, False, (), False, False, 0, 0))[1]) < SHOWN_LINE


def test_a_host_read_without_its_value_is_no_digest(tmp_path: Path, every: Path) -> None:
    assert summary(every)["contains"]["digests"] == 4  # two digests, two host reads: one has a value, so both count
    b = Builder(tmp_path / "a.opreplay", ANONYMOUS)
    cpu = b.writer.device(Device("cpu"))
    tensor = b.tensor(b.storage(16, cpu), b.writer.meta(TensorMeta(DType.float32, STRIDED, cpu, (4,), (1,))))
    b.record(Signature(RecordKind.host_read, (Node(V.string, "method", "tolist"), Node(V.tensor, "tensor"))), [tensor])
    b.frame()
    assert summary(b.close())["contains"]["digests"] == 0


def test_annotations_are_written_fast_and_without_loss() -> None:
    for value in (
        {"captured_ordinal": 17},
        {"a": [1.5, None, True, "é\ud800 \ud83d\ude00 NaN"]},
        {"n": 10**15},
        {"n": 2**53 + 1},
        {"n": 10**4000},
        {"n": [float("inf"), float("nan")]},
        {"Infinity": -(2**60)},
        {"x": 1e300, "\udc80": {"y": ()}},
    ):
        assert json.loads(encode_fast(value)) == json.loads(encode(value))
        json.loads(encode_fast(value), parse_constant=pytest.fail)


def test_text_names_the_policies_and_counts_annotated_records(every: Path) -> None:
    shown = text(every)
    assert re.search("^policies      payload=full, digests=live$", shown, re.MULTILINE)
    assert re.search("^records .*, 3 of them annotated$", shown, re.MULTILINE)


@pytest.mark.slow
def test_what_tells_is_found_among_very_many_texts(tmp_path: Path) -> None:
    b = Builder(tmp_path / "a.opreplay", ANONYMOUS)
    cpu = b.writer.device(Device("cpu"))
    for number in range(5000):
        b.record(
            Signature(RecordKind.synchronize, (Node(V.device, "device", cpu),)),
            annotation=b.writer.annotation(
                {"captured_ordinal": number}
                | ({"assumed": ["made in /srv/x.py:3"]} if number in (0, 2047, 4999) else {})
            ),
        )
    b.frame()
    path = b.close()
    contains = summary(path)["contains"]
    assert (contains["other_paths"], contains["stacks"], summary(path)["annotated"]) == (3, 3, 5000)
    with open_capture(path) as reader:
        said = [record.annotation["captured_ordinal"] for record in reader.records() if record.annotation]
    assert said == list(range(5000)) == [row["annotation"]["captured_ordinal"] for row in rows(path, "synchronize")]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.text(max_size=6)
    | st.sampled_from(HOSTILE)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(notes=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=5))
def test_any_annotation_is_one_strict_row_and_one_line(
    notes: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    b = Builder(tmp_path_factory.mktemp("any") / "any.opreplay", ANONYMOUS)
    cpu = b.writer.device(Device("cpu"))
    for note in notes:
        b.record(
            Signature(RecordKind.synchronize, (Node(V.device, "device", cpu),)),
            annotation=b.writer.annotation(note) if note else 0,
        )
    b.frame()
    with open_capture(b.close()) as reader:
        printed = "".join(jsonl_chunks(reader, Selection()))
        lines = "".join(text_chunks(reader, Selection())).rpartition("\n\n")[2].split("\n")
    assert printed.isascii() and all(line.isprintable() for line in lines) and len(lines) == len(notes) + 1
    found = [json.loads(line, parse_constant=pytest.fail) for line in printed.splitlines()]
    assert [row.get("annotation") for row in found if "ordinal" in row] == [exact(note) or None for note in notes]


@pytest.mark.guarantee("dump-files")
def test_a_dump_opens_no_file_that_a_capture_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "model.bin"
    place.write_bytes(bytes(100))
    path = _with_files(tmp_path / "a.opreplay", (ExternalFile(str(place), 100, digest=DIGEST), [(0, 10, None)]))
    opened: list[object] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            opened.append(arguments[0])

    sys.addaudithook(watch)  # stays for the process, and only counts
    assert rows(path, "external_file")[0]["state"] == "unverified" and "unverified" in text(path)
    assert str(path) in opened and str(place) not in opened
