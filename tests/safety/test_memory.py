"""Files that become much longer when they are read: limits for every frame, and for all definitions of a file."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from failure.table import recorded
from format.reseal import join, split, tables_of
from in_process import Tools

from replayfmt.format.codes import FrameKind, OpStatus, RecordKind, ValueKind
from replayfmt.format.definition_families import METAS
from replayfmt.format.definition_tables import FAMILIES, encode_tables
from replayfmt.format.frames import FLAG_CONSOLIDATED, FREE_DEFINITION_BYTES, MAX_EXPANSION
from replayfmt.format.model import Kernel, Node, Signature
from replayfmt.format.reader import open_capture
from replayfmt.format.signature_layout import SIGNATURES
from replayfmt.format.writer import CaptureWriter


def _bomb(source: Path, target: Path, family: str, rows: int, frames: int) -> Path:
    """The capture with `frames` more frames that define `rows` of a family again: legal, and of no length when they
    are compressed."""
    preamble, parts = split(source.read_bytes())
    tables = [part for part in parts if part.header.kind == FrameKind.tables]
    strings, columns, firsts = tables_of(tables[-1].body)
    streamed = replace(tables[0], header=replace(tables[0].header, flags=tables[0].header.flags & ~FLAG_CONSOLIDATED))
    families = {each.name: each.columns for each in FAMILIES}
    counts = {"string": len(strings), **{name: len(columns[names[0]]) for name, names in families.items()}}
    made = [replace(streamed, body=bytes(encode_tables(strings, columns, firsts)))]
    for _ in range(frames):
        more = {name: column[:0] for name, column in columns.items()}
        for name in families[family]:
            more[name] = np.repeat(columns[name][-1:], rows)
        if family == "meta":
            for name in METAS.nested_columns:
                more[name] = np.repeat(columns[name][-1:], rows * int(more["meta_rank"][0]))
        if family == "signature":  # one op that takes a list of so many things
            for name in families[family]:
                more[name] = columns[name][columns["signature_kernel"] != 0][:1]
            more["signature_nodes"], more["signature_args"] = (np.array([rows], more["signature_nodes"].dtype),) * 2
            more["signature_results"] = more["signature_results"] * 0
            for name in SIGNATURES.nested_columns:
                more[name] = np.zeros(rows, columns[name].dtype)
        first = {name: count + 1 for name, count in counts.items()}
        made.append(replace(streamed, body=bytes(encode_tables([], more, first))))
        counts[family] += len(more[families[family][0]])
    others = [part for part in parts if part.header.kind != FrameKind.tables]
    target.write_bytes(join(preamble, [others[0], *made, *others[1:]], compressed=frozenset({FrameKind.tables})))
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("source"), lambda: torch.ones(3).exp())


@pytest.mark.guarantee("decompression")
@pytest.mark.parametrize("family", ["kernel", "scope", "meta", "device", "signature"])
def test_definitions_cannot_add_up_over_frames(source: Path, tmp_path: Path, tools: Tools, family: str) -> None:
    """Each frame is within the limit of a frame; all together are not."""
    path = _bomb(source, tmp_path / "bomb.opreplay", family, 500_000, 6)
    assert path.stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command in (
        ("dump", "--summary"),
        ("dump", "--format=jsonl"),
        ("check",),
        ("run",),
        ("check", f"--recover={tmp_path / 'recovered.opreplay'}"),
    ):
        done = tools(*command, path)
        assert done.code == 3 and "bytes of definitions in" in done.err and len(done.err.splitlines()) == 1, done
    assert not (tmp_path / "recovered.opreplay").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"


@pytest.mark.slow
@pytest.mark.guarantee("decompression")
def test_a_frame_cannot_become_much_longer_than_it_is(source: Path, tmp_path: Path, tools: Tools) -> None:
    path = _bomb(source, tmp_path / "bomb.opreplay", "kernel", 8_000_000, 1)
    done = tools("dump", "--summary", path)
    assert done.code == 3 and "raw bytes; the limit is" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["scope", "signature"])
def test_what_the_limits_allow_takes_memory_in_proportion(source: Path, tmp_path: Path, family: str) -> None:
    rows = {"scope": 1_000_000, "signature": 800_000}[family]
    path = _bomb(source, tmp_path / "within.opreplay", family, rows, 1)
    script = (
        "import re, sys; from opreplay_tools.dump import main; sys.argv[1:] = ['--summary', sys.argv[1]]\n"
        "try: main()\nfinally: print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=300)
    assert int(done.stderr.split()[-1]) < 400_000, "kilobytes"


@pytest.mark.slow
def test_definitions_that_compress_too_well_are_written_so_that_they_can_be_read(source: Path, tmp_path: Path) -> None:
    """Lists of very many tensors, of many lengths: the writer stores some of their frames as they are."""
    with open_capture(source) as reader:
        session = reader.session
    path = tmp_path / "lists.opreplay"
    writer = CaptureWriter(path, session)
    cat = writer.kernel(Kernel("aten::cat", "default", "aten::cat(Tensor[] tensors) -> Tensor"))
    for count in range(64):
        listed = Node(ValueKind.list, "tensors", None, (Node(ValueKind.tensor),) * (20_000 - count))
        writer.signature(Signature(RecordKind.op, (listed,), (Node(ValueKind.tensor),), cat, OpStatus.ok))
        writer.flush()
    writer.close(0)
    with open_capture(path) as reader:
        tables = reader.contents.frames[reader.contents.frames["kind"] == FrameKind.tables]
        streamed = tables[(tables["flags"] & FLAG_CONSOLIDATED) == 0]
        raw, stored = int(streamed["raw_bytes"].sum()), int(streamed["stored_bytes"].sum())
        assert FREE_DEFINITION_BYTES < raw <= FREE_DEFINITION_BYTES + MAX_EXPANSION * stored
        assert len(reader.signatures[-1].args[0].children) == 20_000 - 63
