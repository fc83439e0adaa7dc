"""Attachments of kernels in dumps: rows, text and summary, and one of them as it is."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import jsonschema
import pytest
from format.samples import write_everything
from in_process import Tool
from opreplay_tools import dump
from safety.code_captures import write as write_code
from xxhash import xxh3_128_hexdigest

from replayfmt.errors import UsageError
from replayfmt.format.codes import KernelKind

from .test_rows import of_kind, schema_of

SOURCE, CUBIN = b"def twice(x):\n    ...\n", b"\x7fELF\x00" * 5000


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with two kernels of code and three attachments."""
    path = tmp_path_factory.mktemp("coded") / "coded.opreplay"
    write_everything(path)
    return path


def test_rows_of_attachments_say_where_their_bytes_are(coded: Path) -> None:
    found = of_kind(coded, "attachment")
    assert [(row["id"], row["role"], row["name"], row["kernels"], row["bytes"], row["payload"]) for row in found] == [
        (1, "source", "twice.py", [4, 5], len(SOURCE), 5),
        (2, "cubin", "", [4], len(CUBIN), 6),
        (3, "from_the_future", "später.bin", [4], 0, 2),
    ]
    assert [row["digest"] for row in found] == [xxh3_128_hexdigest(content) for content in (SOURCE, CUBIN, b"")]
    assert [row["range"]["compression"] for row in found] == ["none", "zstd", "none"]
    place = found[0]["range"]
    assert coded.read_bytes()[place["offset"] :][: place["length"]] == SOURCE
    assert [row["range"] for row in found] == [
        next(each["range"] for each in of_kind(coded, "payload") if each["id"] == row["payload"]) for row in found
    ]
    for row in (*found, *of_kind(coded, "kernel"), *of_kind(coded, "summary")):
        jsonschema.Draft202012Validator(schema_of(row["kind"])).validate(row)


def test_a_kernels_row_lists_its_attachments_and_its_kind(coded: Path) -> None:
    assert [(row["kernel_kind"], row["attachments"]) for row in of_kind(coded, "kernel")] == [
        ("operator", []),
        ("operator", []),
        ("triton", []),
        ("triton", [1, 2, 3]),
        ("inductor_cpp", [1]),
    ]


def test_the_summary_says_how_much_code_there_is(coded: Path, plain: Path, run: Tool) -> None:
    (row,) = of_kind(coded, "summary")
    assert row["code"] == {"kernels": 2, "attachments": 3, "sources": 1, "bytes": len(SOURCE) + len(CUBIN)}
    contains = row["contains"]
    assert contains["code_bytes"] == len(SOURCE) + len(CUBIN) and contains["code_sources"] == 1
    assert contains["content_bytes"] == row["payloads"]["bytes"] - row["code"]["bytes"]
    text = run("--summary", coded).out
    assert "\ncode          2 kernels, 3 attachments of 25,022 bytes: runs only with --allow-code\n" in text
    assert "25,022 bytes of kernels' code, 1 source of kernels" in text
    assert of_kind(plain, "summary")[0]["code"] == {"kernels": 0, "attachments": 0, "sources": 0, "bytes": 0}
    assert "code" not in run("--summary", plain).out


def test_text_lists_attachments_before_the_records(coded: Path, plain: Path, run: Tool) -> None:
    lines = [line for line in run(coded).out.splitlines() if line.startswith("attachment ")]
    source, cubin, future = of_kind(coded, "attachment")
    assert lines == [
        f"attachment 1: source 'twice.py', 22 bytes at {source['range']['offset']:#x}, {source['digest']}, of "
        "triton::twice.v1, inductor_cpp::fused.v1",
        f"attachment 2: cubin '', 25,000 bytes at {cubin['range']['offset']:#x}, zstd {cubin['range']['length']:,}, "
        f"{cubin['digest']}, of triton::twice.v1",
        f"attachment 3: from_the_future 'später.bin', 0 bytes at {future['range']['offset']:#x}, {future['digest']}, "
        "of triton::twice.v1",
    ]
    assert "attachment" not in run(plain).out and "attachment 1" not in run("--ops=0:3", coded).out


@pytest.mark.parametrize(("number", "content"), [(1, SOURCE), (2, CUBIN), (3, b"")])
def test_an_attachment_is_written_as_it_is(coded: Path, number: int, content: bytes, tmp_path: Path, run: Tool) -> None:
    out = tmp_path / "out"
    assert run(f"--attachment={number}", "-o", out, coded).code == 0
    assert out.read_bytes() == content and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_a_file_an_attachment_goes_to_stdout_byte_for_byte(
    coded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\r\n")
    monkeypatch.setattr(sys, "stdout", written)
    dump.write_bytes(CUBIN, str(coded), None, False)
    assert written.buffer.getvalue() == CUBIN  # type: ignore[attr-defined]


def test_bytes_of_a_capture_are_never_written_to_a_terminal(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", written)
    with pytest.raises(UsageError, match="a terminal acts on them; use --output or a pipe"):
        dump.write_bytes(b"\x1b[2J", str(coded), None, False)
    assert written.buffer.getvalue() == b""  # type: ignore[attr-defined]


def test_a_file_is_replaced_with_force_alone_and_never_by_its_own_attachment(
    coded: Path, tmp_path: Path, run: Tool
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    refused = run("--attachment=1", "-o", out, coded)
    assert refused.code == 1 and "exists already" in refused.err and out.read_bytes() == b"mine"
    assert run("--attachment=1", "-o", out, "--force", coded).code == 0 and out.read_bytes() == SOURCE
    before = coded.read_bytes()
    refused = run("--attachment=1", "-o", coded, "--force", coded)
    assert refused.code == 2 and "is the capture itself" in refused.err and coded.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--attachment=0"], "has the attachments 1 to 3"),
        (["--attachment=4"], "has the attachments 1 to 3"),
        (["--attachment=-1"], "has the attachments 1 to 3"),
        (["--attachment=one"], "has the attachments 1 to 3"),
        (["--attachment=" + "9" * 40], "has the attachments 1 to 3"),
        (["--attachment=1", "--summary"], "it goes with --output alone"),
        (["--attachment=1", "--kernel-skeleton=1"], "it goes with no other flag"),
        (["-o", "x"], "--output is for --attachment"),
        (["--attachment=1", "--force"], "--force is for --output"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(coded: Path, given: list[str], said: str, run: Tool) -> None:
    ran = run(*given, coded)
    assert ran.code == 2 and said in ran.err and ran.out == ""


@pytest.mark.parametrize(
    ("kind", "metadata", "source", "code", "said"),
    [
        (KernelKind.triton, b'{"function": 3}', SOURCE, 2, "does not name its function"),
        (KernelKind.triton, b'{"function": "a b"}', SOURCE, 2, "does not name its function"),
        (KernelKind.triton, b'{"function": "x"}', b"def x(:", 2, "invalid syntax"),
        (KernelKind.triton, b'{"function": "x"}', b"\0", 2, "no skeleton can be written"),
        (KernelKind.triton, b'{"function": "x"}', b"\xff", 2, "no skeleton can be written"),
        (KernelKind.inductor_cpp, b'{"parameters": 3}', SOURCE, 2, "have no names"),
        (KernelKind.inductor_cpp, b'{"parameters": ""}', b"\"\"\" '''", 2, "no skeleton can be written"),
        (KernelKind.triton, b"[" * 100_000, SOURCE, 3, "is not JSON"),
        (KernelKind.triton, b"[]", SOURCE, 3, "is not a JSON object"),
    ],
)
def test_a_skeleton_believes_no_metadata(
    tmp_path: Path, kind: KernelKind, metadata: bytes, source: bytes, code: int, said: str, run: Tool
) -> None:
    path = write_code(tmp_path / "c.opreplay", [("metadata", metadata), ("source", source)], kind=kind, called=False)
    ran = run("--kernel-skeleton=1", "--allow-code", path)
    assert ran.code == code and said in ran.err and len(ran.err.splitlines()) == 1 and not ran.out


def test_a_capture_without_attachments_says_so(plain: Path, run: Tool) -> None:
    ran = run("--attachment=1", plain)
    assert ran.code == 2 and "has no attachments" in ran.err


def test_attachments_of_an_incomplete_capture_are_there(coded: Path, tmp_path: Path, run: Tool) -> None:
    cut, out = tmp_path / "cut.opreplay", tmp_path / "out"
    cut.write_bytes(coded.read_bytes()[:-64])
    assert [row["id"] for row in of_kind(cut, "attachment")] == [1, 2, 3]
    assert run("--attachment=2", "-o", out, cut).code == 0 and out.read_bytes() == CUBIN


def test_nothing_is_written_of_a_damaged_attachment(coded: Path, tmp_path: Path, run: Tool) -> None:
    damaged, out = tmp_path / "damaged.opreplay", tmp_path / "out"
    data = bytearray(coded.read_bytes())
    data[of_kind(coded, "attachment")[0]["range"]["offset"]] ^= 1
    damaged.write_bytes(data)
    ran = run("--attachment=1", "-o", out, damaged)
    assert ran.code == 3 and "payload 5" in ran.err and not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.opreplay"]
