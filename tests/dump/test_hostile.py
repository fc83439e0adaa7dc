"""Captures that are valid and absurd: small files that would make endless rows. Memory and time stay bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks, text_chunks
from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, KernelKind, OpStatus, RecordKind
from replayfmt.format.codes import ValueKind as V
from replayfmt.format.model import Device, Kernel, Node, Signature, TensorMeta
from replayfmt.format.reader import open_capture

from .captures import STRIDED, Builder


def longest_chunk(path: Path) -> int:
    with open_capture(path) as reader:
        return max(len(chunk) for make in (jsonl_chunks, text_chunks) for chunk in make(reader, Selection()))


@pytest.mark.slow
def test_scopes_nested_without_end_have_abridged_paths(tmp_path: Path) -> None:
    b = Builder(tmp_path / "deep.opreplay")
    scope = 0
    for depth in range(3000):
        scope = b.writer.scope(scope, f"level {depth}")
        b.record(Signature(RecordKind.scope_begin, (Node(V.string, "name", f"level {depth}"),)), scope=scope)
    b.frame()
    path = b.close()
    assert longest_chunk(path) < 40_000_000
    with open_capture(path) as reader:
        last = jsonl_chunks(reader, Selection(start=2999))
        rows = [json.loads(line) for chunk in last for line in chunk.splitlines()]
        assert rows[2]["scope"].startswith("…") and rows[2]["scope"].endswith("level 2998/level 2999")
        assert len(rows[2]["scope"]) == 2049
        whole = reader.scope_path(scope)
        chunks = jsonl_chunks(reader, Selection(scope=whole))
        assert [json.loads(line)["kind"] for chunk in chunks for line in chunk.splitlines()][2:] == ["scope_begin"]


@pytest.mark.slow
def test_a_long_name_that_many_records_share_is_not_multiplied_in_memory(tmp_path: Path) -> None:
    b = Builder(tmp_path / "long.opreplay")
    kernel = b.writer.kernel(Kernel("long::" + "x" * 1_000_000, "default", "", KernelKind.collective))
    call = Signature(RecordKind.op, (), (), kernel, OpStatus.ok)
    for _ in range(300):
        b.record(call)
    b.frame()
    assert longest_chunk(b.close()) < 1 << 27


@pytest.mark.slow
def test_a_single_row_without_end_is_refused(tmp_path: Path) -> None:
    b = Builder(tmp_path / "row.opreplay")
    kernel = b.writer.kernel(Kernel("a::b", "default", ""))
    text = Node(V.string, "text", "x" * 1_000_000)
    b.record(Signature(RecordKind.op, (text,) * 20, (), kernel, OpStatus.ok))
    b.frame()
    with open_capture(b.close()) as reader, pytest.raises(InvalidCapture, match="a row of its records could take"):
        list(jsonl_chunks(reader, Selection()))


@pytest.mark.slow
def test_tensors_of_absurd_rank_are_refused(tmp_path: Path) -> None:
    b = Builder(tmp_path / "rank.opreplay")
    w = b.writer
    cpu = w.device(Device("cpu"))
    meta = w.meta(TensorMeta(DType.float32, STRIDED, cpu, (1,) * 65535, (1,) * 65535))
    kernel = w.kernel(Kernel("a::b", "default", ""))
    storage = b.storage(8000, cpu)
    for offset in range(1100):
        b.record(
            Signature(RecordKind.op, (Node(V.tensor, "x"),), (), kernel, OpStatus.ok), [b.tensor(storage, meta, offset)]
        )
    b.frame()
    with open_capture(b.close()) as reader:
        for make in (jsonl_chunks, text_chunks):
            with pytest.raises(InvalidCapture, match="the tensors of its records could take"):
                list(make(reader, Selection()))
