"""The streaming reader: whatever the chunks, and whatever is wrong with the file."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import CaptureNotFound, InvalidCapture
from replayfmt.importers.common import json_stream
from replayfmt.importers.common.json_stream import JsonStream
from replayfmt.importers.common.trace_files import TraceFile, archive_texts
from replayfmt.importers.importing import import_trace, sniff

EVENTS = [
    {"ph": "X", "name": f"op {i}", "ts": i * 0.5, "args": {"n": [i, -i, 1e-5], "s": 'a"}]\\b{'}} for i in range(40)
]
WHOLE = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": EVENTS, "traceName": "x", "last": 12345678}


def read(data: bytes | str, tmp_path: Path, name: str = "t.json") -> tuple[list[Any], dict[str, Any], JsonStream]:
    """Events, other members, and the stream after reading."""
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with JsonStream.open(path) as stream:
        entries = list(stream.entries({"traceEvents"}))
    return (
        [value for key, value in entries if key == "traceEvents"],
        {key: value for key, value in entries if key != "traceEvents"},
        stream,
    )


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1000, 1 << 20])
def test_entries_do_not_depend_on_where_chunks_end(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(TraceFile, "read", lambda self, size, old=TraceFile.read: old(self, chunk))
    events, others, stream = read(json.dumps(WHOLE, indent=1 if chunk % 2 else None), tmp_path)
    assert events == EVENTS
    assert others == {key: value for key, value in WHOLE.items() if key != "traceEvents"}
    assert not stream.problems and stream.complete


def _nodes(names: list[str], broken: int | None = None) -> str:
    """An execution trace as PyTorch writes it: names are not escaped. The inputs of one node may be damaged."""
    texts = (
        f'{{\n "id": {place}, "name": "{name}", "ctrl_deps": 1,\n "inputs": {"[[1" if place == broken else []},\n'
        ' "attrs": [{"name": "rf_id", "value": 0},{"name": "scope", "value": 7}]\n }'
        for place, name in enumerate(names)
    )
    return '{"schema": "1.1.1", "nodes": [\n' + ",\n".join(texts) + '\n], "finish_ts": 3}'


@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_names_of_nodes_may_hold_quotes(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceFile, "read", lambda self, size, old=TraceFile.read: old(self, chunk))
    names = ["a", 'step "1", {', '5" screen', "b", '["]', 'é "x" \\w', *"cd" * 20, '"']
    (tmp_path / "e.json").write_text(_nodes(names))
    with JsonStream.open(tmp_path / "e.json") as stream:
        read = [(key, value) for key, value in stream.entries({"nodes"}) if key != "schema"]
    assert [value["name"] for key, value in read if key == "nodes"] == names and read[-1] == ("finish_ts", 3)
    assert stream.problem_counts == {"invalid name": 5} and stream.complete
    quoted = _nodes(names).index('{\n "id": 1')
    assert stream.problems[0].offset == quoted and "quotes in a name" in stream.problems[0].text


def test_of_a_damaged_node_nothing_else_is_lost(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(_nodes(["a"] * 9, broken=4))
    with JsonStream.open(tmp_path / "e.json") as stream:
        nodes = [value for key, value in stream.entries({"nodes"}) if key == "nodes"]
    assert [each["id"] for each in nodes] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert stream.problem_counts["skipped"] == 1


def test_an_outer_array_gives_its_elements(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(EVENTS))
    with JsonStream.open(path) as stream:
        assert list(stream.entries({"traceEvents"})) == [("", event) for event in EVENTS]


def test_gzip_tar_and_zip_are_unpacked_by_content(tmp_path: Path) -> None:
    text = json.dumps(WHOLE).encode()
    assert read(gzip.compress(text), tmp_path)[0] == EVENTS
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in (("dir/kernel.py", b"code"), ("._t.json", b"junk"), ("dir/t.json", text)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert read(packed.getvalue(), tmp_path)[0] == EVENTS
    assert archive_texts(tmp_path / "t.json", lambda name: name.endswith(".py")) == ({"dir/kernel.py": b"code"}, "")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("README", "no")
        archive.writestr("t.json", text)
    assert read(zipped.getvalue(), tmp_path)[0] == EVENTS


def test_a_file_that_was_cut_off_gives_what_is_whole_and_says_where_it_ended(tmp_path: Path) -> None:
    text = json.dumps(WHOLE)
    cut = text.index('"op 30"') + 3
    events, _others, stream = read(text[:cut], tmp_path)
    assert events == EVENTS[:30]
    assert not stream.complete
    assert text.rindex("{", 0, cut - 5) - 80 < stream.problems[0].offset <= cut
    assert "ends within an entry" in stream.problems[0].text


@pytest.mark.parametrize("cut", range(0, 3000, 97))
def test_any_cut_gives_a_prefix_of_the_events(cut: int, tmp_path: Path) -> None:
    text = json.dumps(WHOLE)
    try:
        events, _others, stream = read(text[:cut], tmp_path)
    except InvalidCapture:
        assert cut == 0
        return
    assert events == EVENTS[: len(events)]
    assert not stream.complete and stream.problems


def test_a_gzip_file_that_was_cut_off_gives_what_can_be_decompressed(tmp_path: Path) -> None:
    many = [{**event, "i": i, "h": hash((i, "x"))} for i in range(4000) for event in EVENTS[:1]]
    packed = gzip.compress(json.dumps({"traceEvents": many}).encode())
    events, _others, stream = read(packed[: len(packed) // 2], tmp_path)
    assert 1000 < len(events) < 4000 and events == many[: len(events)]
    assert not stream.complete
    assert any("damaged" in problem.text for problem in stream.problems)


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ('{"a": [1, 2,], "b": {"c": 1,},}', "trailing comma"),
        ('{"a": [1, 2], "b": {"c": nan, "d": -inf}}', "bare word"),
        ('{"a": [1, 2], "p": "C:\\temp\\x"}', "invalid escape"),
    ],
)
def test_what_exporters_get_wrong_is_read_and_noted(written: str, kind: str, tmp_path: Path) -> None:
    events, others, stream = read(f'{{"traceEvents": [{{"n": 1}}, {written}, {{"n": 2}},], "x": 1,}}', tmp_path)
    assert len(events) == 3 and events[1]["a"] == [1, 2] and events[2] == {"n": 2}
    assert others == {"x": 1}
    assert stream.problem_counts[kind] and stream.complete


def test_bare_nan_and_infinity_are_numbers(tmp_path: Path) -> None:
    events, _others, stream = read('{"traceEvents": [{"a": NaN, "b": -Infinity}]}', tmp_path)
    assert math.isnan(events[0]["a"]) and events[0]["b"] == -math.inf
    assert not stream.problems


def test_bytes_that_are_no_utf8_are_kept_and_noted_with_their_place(tmp_path: Path) -> None:
    data = b'{"traceEvents": [{"name": "a\xff\xfeb"}, {"name": "\xc3\xa9"}]}'
    events, _others, stream = read(data, tmp_path)
    assert events[0]["name"].encode("utf-8", "surrogateescape") == b"a\xff\xfeb"
    assert events[1]["name"] == "é"
    assert stream.problems[0].offset == data.index(b"\xff")


def test_an_entry_that_cannot_be_read_is_skipped_and_the_rest_goes_on(tmp_path: Path) -> None:
    events, _others, stream = read('{"traceEvents": [{"ph": 1}, {"ph" 2}, {"ph": 3}, @#! , {"ph": 4}]}', tmp_path)
    assert events == [{"ph": 1}, {"ph": 3}, {"ph": 4}]
    assert stream.problem_counts["skipped"] == 2 and not stream.complete


@pytest.mark.parametrize(
    "data", [b"", b"   ", b"hello", b"OPREPLAY\x01", b"\x1f\x8b", b"\x1f\x8b\x08\x00garbage", b"PK\x03\x04"]
)
def test_what_is_no_json_is_refused_in_one_sentence(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidCapture, match="t.json"):
        read(data, tmp_path)


def test_a_checksum_that_does_not_fit_is_told_in_words(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"traceEvents": []}'))
    packed[-6] ^= 255
    with pytest.raises(InvalidCapture, match=r"not JSON: the gzip data is damaged: CRC check failed"):
        read(bytes(packed), tmp_path, "t.json.gz")


def test_a_trace_without_events_is_told_from_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(InvalidCapture, match="the trace has no operator events"):
        sniff(path)
    path.write_text('{"schemaVersion": 1}')
    with pytest.raises(InvalidCapture, match="not a known kind of trace"):
        sniff(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureNotFound, match="nowhere.json"):
        JsonStream.open(tmp_path / "nowhere.json")


MILLION = 1 << 20
RELU = b'{"ph": "X", "cat": "cpu_op", "name": "aten::relu", "ts": 1, "dur": 1}'


def peak(path: Path) -> tuple[int, int, JsonStream]:
    """Entries read, and the most memory in use while they were."""
    tracemalloc.start()
    with JsonStream.open(path) as stream:
        count = sum(1 for _ in stream.entries({"traceEvents"}))
    _now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return count, most, stream


def packed(path: Path, *parts: bytes | tuple[bytes, int]) -> Path:
    """A gzip file of bytes, and of bytes repeated."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for part in parts:
            data, times = part if isinstance(part, tuple) else (part, 1)
            for _ in range(times):
                file.write(data)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("text", [b"a", b"\\n", b"\xc3\xa9"])
def test_a_long_string_takes_memory_of_its_own_size(text: bytes, tmp_path: Path) -> None:
    # The comma before the end makes the entry one that is looked at by its brackets and strings.
    block = text * (MILLION // len(text))
    path = packed(tmp_path / "t.gz", b'{"traceEvents": [{"name": "', (block, 6), b'",}, {}]}')
    count, most, stream = peak(path)
    assert path.stat().st_size < 100 << 10
    assert count == 2 and stream.complete and most < 100 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "filler", "after"),
    [
        (b'[{"name": "', b"a", b""),
        (b'[{"name": "', b"a", b'"}, '),
        (b'[{"ts": 0.', b"1", b"}, "),
        (b'[{"ts": ', b"1", b"}, "),
        (b"[", b"1", b", "),
        (b"[-0.", b"1", b", "),
        (b'[{"a": ', b" ", b"1}, "),
        (b'[{"a": [', b"[],", b"1]}, "),
    ],
)
def test_an_endless_entry_is_skipped_in_bounded_memory(
    before: bytes, filler: bytes, after: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "_LONGEST_ENTRY", MILLION // 4)
    rest = after + RELU + b"]}" if after else b""
    path = packed(tmp_path / "t.gz", b'{"traceEvents": ' + before, (filler * (MILLION // len(filler)), 4), rest)
    count, most, stream = peak(path)
    assert count == bool(after) and stream.problem_counts["skipped"] and not stream.complete
    assert "an entry of more than 262144 characters" in stream.problems[0].text
    assert most < 48 << 20


@pytest.mark.slow
def test_white_space_between_entries_takes_no_memory(tmp_path: Path) -> None:
    path = packed(tmp_path / "t.gz", b'{"traceEvents": [', (b" \n\t\r" * (MILLION // 4), 40), RELU, b"]}")
    count, most, stream = peak(path)
    assert count == 1 and stream.complete and most < 10 << 20


@pytest.mark.slow
def test_data_before_damage_is_decompressed_in_bounded_memory(tmp_path: Path) -> None:
    path = packed(tmp_path / "t.gz", b'{"traceEvents": [', RELU, b", ", (b" " * MILLION, 30), RELU, b"]}")
    data = bytearray(path.read_bytes())
    data[-6] ^= 255
    path.write_bytes(data)
    count, most, stream = peak(path)
    assert count == 1 and "CRC" in str(stream.problems[-1]) and most < 20 << 20


@pytest.mark.slow
def test_a_tar_header_of_any_length_is_not_read_whole(tmp_path: Path) -> None:
    header = tarfile.TarInfo("./PaxHeaders/x")
    header.type, header.size = tarfile.XHDTYPE, 100 * MILLION
    path = packed(tmp_path / "t.tgz", header.tobuf(tarfile.USTAR_FORMAT), (b" " * MILLION, 100))
    tracemalloc.start()
    with pytest.raises(InvalidCapture, match=r"cannot be unpacked: ReadError: a header of 104857600 bytes"):
        TraceFile(path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["empty.tar", "empty.tar.gz"])
def test_an_archive_of_nothing_is_called_so(name: str, tmp_path: Path) -> None:
    tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w").close()
    with pytest.raises(InvalidCapture, match=r"begins with 512 zero bytes: an empty tar archive"):
        import_trace(tmp_path / name, tmp_path / "out.opreplay")
    with pytest.raises(InvalidCapture, match=r"begins with 512 zero bytes: an empty tar archive"):
        import_trace(tmp_path / name, tmp_path / "out.opreplay", rank=0)


@pytest.mark.slow
def test_a_trace_of_one_endless_entry_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_LONGEST_ENTRY", MILLION)
    path = packed(tmp_path / "t.json.gz", b'{"traceEvents": [{"name": "', (b"a" * MILLION, 4))
    with pytest.raises(InvalidCapture, match="not a known kind of trace.*an entry of more than 1048576 characters"):
        import_trace(path, tmp_path / "out.opreplay")
    assert not (tmp_path / "out.opreplay").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.json.gz"
    line = json.dumps(EVENTS[0]).encode() + b",\n"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(200):
            file.write(line * 1000)
        file.write(b"{}]}")
    seen = []
    tracemalloc.start()
    with JsonStream(TraceFile(path, progress=lambda done, total: seen.append((done, total)))) as stream:
        count = sum(1 for _ in stream.entries({"traceEvents"}))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 200_001 and len(line) * 200_000 > 15 << 20
    assert peak < 10 << 20
    assert seen[-1] == (path.stat().st_size, path.stat().st_size) and seen == sorted(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [
        "{a},",
        '{"ph":1,',
        '{"ph":[,',
        '{"ph":1,x{"ph":1,',
        "1e,",
        "!,",
        '{"ph":"x},',
        '"\\x",',
        '{"a":nan},',
        ",,,",
        '{"ph":1}}',
        '{"ph":1}\n{a}\n',
    ],
)
def test_reading_damage_costs_no_more_than_its_length(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in characters: those that a decoding error looks at (its message has a line number), and those that are
    looked through for an entry's end."""
    looked = 0

    class Counted(json.JSONDecodeError):
        def __init__(self, message: str, text: str, place: int) -> None:
            nonlocal looked
            looked += place
            super().__init__(message, text, place)

    class Structure:
        def finditer(self, text: str, place: int) -> Any:
            nonlocal looked
            for found in structure.finditer(text, place):
                looked += len(found.group()) + 1
                yield found

    structure = json_stream._STRUCTURE
    monkeypatch.setattr(json.decoder, "JSONDecodeError", Counted)
    monkeypatch.setattr(json_stream, "_STRUCTURE", Structure())
    monkeypatch.setattr(json_stream, "_MOST_IN_VAIN", 1 << 20)
    data = '{"traceEvents":[{"ph":"X"},' + entry * 20_000 + '{"ph":"Y"}]}'
    events, _members, stream = read(data, tmp_path)
    assert events[0] == {"ph": "X"} and bool(stream.problem_counts) == (entry != ",,,")
    assert looked < 8 * len(data) + 4 * (1 << 20), looked / len(data)


def test_what_is_read_after_damage_has_its_true_place(tmp_path: Path) -> None:
    good = [{"ph": "X", "name": f"ö{number}"} for number in range(50)]
    parts = [json.dumps(each, ensure_ascii=False) for each in good]
    data = '{"traceEvents":[' + ",{a},".join(parts) + ',{"b":c}]}'
    events, _members, stream = read(data, tmp_path)
    assert events == good and stream.problem_counts == {"skipped": 50}
    raw = data.encode()
    places = [raw.index(b"{a}")]
    while len(places) < 3:
        places.append(raw.index(b"{a}", places[-1] + 1))
    assert [each.offset for each in stream.problems] == places


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for kind in ("auto", "kineto", "execution-trace", "tracelens"):
        with pytest.raises(CaptureNotFound, match="pipe.json: is no regular file; expected a trace file"):
            import_trace(pipe, tmp_path / "out.opreplay", kind=kind)
    with pytest.raises(CaptureNotFound, match="is a directory; expected a trace file"):
        import_trace(tmp_path, tmp_path / "out.opreplay")


@pytest.mark.parametrize(("local", "central", "values"), [(6, 8, (1, 0)), (8, 10, (99, 0))])
def test_a_zip_that_is_encrypted_or_packed_in_an_unknown_way_is_one_error(
    local: int, central: int, values: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "trace.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.json", json.dumps(WHOLE))
    data = bytearray(path.read_bytes())
    for magic, place in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = data.index(magic) + place
        data[at : at + 2] = bytes(values)
    path.write_bytes(data)
    with pytest.raises(InvalidCapture, match=r"trace.zip: cannot be unpacked: .*(encrypted|not supported)"):
        import_trace(path, tmp_path / "out.opreplay")


def test_a_schema_with_a_lone_surrogate_is_no_schema() -> None:
    from replayfmt.pytorch.overloads import parse_schema

    for text in ("aten::relu\ud800(Tensor self) -> Tensor", "aten::relü(Tensor self) -> Tensor"):
        with pytest.raises(ValueError, match="characters that no name has"):
            parse_schema(text)
