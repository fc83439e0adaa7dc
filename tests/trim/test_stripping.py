"""Stripped captures: metadata alone. Nothing of the content, the machine or the user may be left in the file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from replay.rewriting import rewrite

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import InvalidCapture, ReplayRefused
from replayfmt.format.codes import OpStatus, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.maintenance import check_capture
from replayfmt.format.model import CaptureInfo, Device, ExternalFile, FileRange, Kernel, Node, Record, Signature
from replayfmt.format.reader import open_capture
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.writer import CaptureWriter
from replayfmt.replay.plan import Plan
from replayfmt.trim.trimming import TrimResult, strip_capture

from .conftest import Captured

GOLDEN = Path(__file__).parents[1] / "golden"
HOME = "/".join(("", "home", "alice"))  # no path of a machine stands in any file of the project
SECRET = 12345.6789


def program() -> None:
    weights = torch.tensor([SECRET, 2.0, 3.0])
    lengths = torch.from_numpy(np.array([987654321, 5], np.int64))
    with replayfmt.scope("execute"):
        hidden = torch.nn.functional.dropout(weights * 2, 0.5)
        hidden.tolist()
        (hidden.sum() + lengths.sum()).item()
        bool((weights > 1).all())


def strip(path: Path, out: Path, **wanted: str) -> TrimResult:
    with open_capture(path) as reader:
        return strip_capture(reader, str(out), OpSelection(**wanted))


def bodies(path: Path) -> Iterator[bytes]:
    """Everything in a file, decompressed."""
    yield path.read_bytes()
    with open_capture(path) as reader:
        for position in range(len(reader.contents.frames)):
            if not reader.contents.payloads.size:
                yield reader.read_frame(position)[1]
        for number in range(1, len(reader.payloads) + 1):
            yield bytes(reader.payload(number))


def test_no_byte_of_content_and_nothing_of_the_machine_is_left(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough not to be in a file by chance.
    monkeypatch.setattr(sys, "argv", ["/somewhere/the program of the tests.py"])
    monkeypatch.setattr(platform, "node", lambda: "the machine of the tests")
    path, out = captured(program), tmp_path / "out.opreplay"
    result = strip(path, out)
    assert result.embedded_bytes == 0
    with open_capture(path) as reader:
        read = next(
            record
            for record in reader.records()
            if reader.kernels[record.signature.kernel] is not None
            and reader.kernels[record.signature.kernel].name == "aten::_local_scalar_dense"
        )
        scalar, session = read.results[0], reader.session
        contents = [bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1)]
    assert isinstance(scalar, float) and session.host == platform.node()
    secrets = [
        np.float32(SECRET).tobytes(),
        np.int64(987654321).tobytes(),
        np.float64(scalar).tobytes(),
        session.host.encode(),
        os.getcwd().encode(),
        str(tmp_path).encode(),
        sys.argv[0].encode(),
        *contents,
    ]
    found = list(bodies(out))
    assert len(found) > 4, "every frame is looked at"
    for secret in secrets:
        assert secret
        assert not any(secret in body for body in found), secret
    with open_capture(out) as reader:
        assert len(reader.payloads) == 0
        assert reader.session.policies["redact"] is True
        assert (reader.session.policies["payload"], reader.session.policies["digests"]) == ("none", "none")
        assert RecordKind.digest not in reader.summary.records or not reader.summary.records[RecordKind.digest]


def test_everything_that_is_metadata_stays(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(program), tmp_path / "out.opreplay"
    strip(path, out)
    check_capture(str(out))
    with open_capture(path) as one, open_capture(out) as other:
        mine, theirs = one.summary, other.summary
        assert theirs.ended_ns == mine.ended_ns
        assert {**mine.records, RecordKind.digest: 0} == {**theirs.records, RecordKind.digest: 0}
        assert one.kernels[1:] == other.kernels[1:]
        assert one.session.torch_version == other.session.torch_version
        pairs = zip(
            [r for r in one.records() if r.kind is RecordKind.op],
            [r for r in other.records() if r.kind is RecordKind.op],
            strict=True,
        )
        for source, record in pairs:
            assert source.start_ns == record.start_ns
            assert one.kernels[source.signature.kernel] == other.kernels[record.signature.kernel]
            assert [node.name for node in source.signature.args] == [node.name for node in record.signature.args]
        imported = [other.storage(number).origin for number in range(1, other.storage_count + 1)]
        assert StorageOrigin.payload not in imported and imported.count(StorageOrigin.absent) == 2
        assert [record.annotation for record in other.records()] == [None] * other.record_count


def test_a_part_can_be_stripped_and_says_where_it_comes_from(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(program), tmp_path / "out.opreplay"
    result = strip(path, out, kernel="aten::mul*")
    with open_capture(out) as reader, open_capture(path) as original:
        records = [record for record in reader.records() if record.kind is RecordKind.op]
        assert len(records) == result.ops == 2
        for record in records:
            assert record.annotation is not None
            source = original.record(record.annotation["captured_ordinal"])
            assert original.kernels[source.signature.kernel] == reader.kernels[record.signature.kernel]
            assert reader.scope_path(record.scope) == original.scope_path(source.scope) == "execute"
        assert reader.session.policies["trimmed-from"] == original.session.session_id
        assert reader.session.policies["trimmed-selection"] == "--kernel=aten::mul*"


def test_a_capture_that_cannot_be_replayed_can_be_stripped(tmp_path: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    write_odd_capture(path)
    with pytest.raises(ReplayRefused):
        Plan(path)
    strip(path, out)
    check_capture(str(out))
    with open_capture(out) as reader:
        details = [record.argument("detail") for record in reader.records() if record.kind is RecordKind.unsupported]
        assert details == ["failed at (redacted), line 3"]
        kinds = {
            node.name: node.kind
            for record in reader.records()
            for node in record.signature.args
            if record.kind is RecordKind.op
        }
        assert kinds["filename"] is ValueKind.opaque and kinds["mode"] is ValueKind.string
        assert reader.scope_path(1) == "(redacted)"
        assert list(reader.files[1:]) == [] and list(reader.file_ranges[1:]) == []
    assert not any(b"alice" in body for body in bodies(out))


def write_odd_capture(path: Path) -> None:
    """Paths in every place where a capture may have text, and an operator that nobody has."""
    session = CaptureInfo(
        "01234567-89ab-cdef-0123-456789abcdef",
        "opreplay",
        "1",
        host="greybox",
        argv=(f"{HOME}/train.py",),
        working_directory=f"{HOME}",
    )
    writer = CaptureWriter(path, session)
    cpu = writer.device(Device("cpu", -1, "EPYC"))
    kernel = writer.kernel(Kernel("nobody::has", "default", "nobody::has(str filename, str mode) -> ()"))
    scope = writer.scope(0, f"{HOME}/model")
    range_id = writer.range(FileRange(writer.file(ExternalFile(f"{HOME}/w.bin", 8, digest="0" * 32)), 0, 8))
    signatures = [
        writer.signature(Signature(RecordKind.scope_begin, (Node(ValueKind.string, "name", f"{HOME}/model"),))),
        writer.signature(
            Signature(
                RecordKind.storage_import,
                (
                    Node(ValueKind.storage, "storage"),
                    Node(ValueKind.range, "payload"),
                    Node(ValueKind.int, "version"),
                    Node(ValueKind.string, "reason", "first_use"),
                ),
            )
        ),
        writer.signature(
            Signature(
                RecordKind.op,
                (
                    Node(ValueKind.storage, "storage"),
                    Node(ValueKind.string, "filename", f"{HOME}/w.bin"),
                    Node(ValueKind.string, "mode", "floor"),
                ),
                (),
                kernel,
                OpStatus.ok,
            )
        ),
        writer.signature(
            Signature(
                RecordKind.unsupported,
                (
                    Node(ValueKind.string, "reason", "host_call"),
                    Node(ValueKind.string, "op", "f"),
                    Node(ValueKind.string, "detail", f"failed at '{HOME}/my code.py', line 3"),
                ),
            )
        ),
    ]
    count = len(signatures)
    writer.records(
        RecordColumns(
            signature=signatures,
            scope=[scope] * count,
            thread=[0] * count,
            start_ns=list(range(count)),
            duration_ns=None,
            tensors=[],
            ints=[1, range_id, 0, 1],
            floats=[],
            tensor_definitions={},
            first_storage=1,
            storage_bytes=[8],
            storage_device=[cpu],
            storage_origin=[StorageOrigin.external_file],
            storage_payload=[range_id],
        )
    )
    writer.close(10)


@pytest.mark.slow
def test_stripping_works_where_torch_is_not_installed(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(program), tmp_path / "out.opreplay"
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['opreplay-trim', '--payload=none', '--scope=execute', {str(path)!r}, {str(out)!r}]\n"
        "from opreplay_tools.trim import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("keeps 1")
    check_capture(str(out))


def test_a_capture_that_says_nonsense_is_one_error(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(5)
        x.untyped_storage().resize_(400)
        x.add(1)

    def negative(record: Record, ints: list[int], floats: list[float]) -> None:
        if record.kind is RecordKind.storage_resize:
            ints[1] = -7

    path, odd, out = captured(program), tmp_path / "odd.opreplay", tmp_path / "out.opreplay"
    rewrite(path, odd, change=negative)
    with pytest.raises(InvalidCapture, match="bytes of storage_resize holds -7"):
        strip(odd, out, ops="1:")
    assert not any(each.name.startswith("out") for each in tmp_path.iterdir())


def test_a_selection_that_names_a_path_is_redacted_too(tmp_path: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    write_odd_capture(path)
    strip(path, out, scope=f"{HOME}/model")
    with open_capture(out) as reader:
        assert reader.session.policies["trimmed-selection"] == "--scope=(redacted)"


@pytest.mark.parametrize("name", ["everything-1.0", "recovered-1.0", "reference-1.0", "step-1.0"])
def test_captures_with_records_of_every_kind_can_be_stripped(name: str, tmp_path: Path) -> None:
    path, out = GOLDEN / f"{name}.opreplay", tmp_path / "out.opreplay"
    with open_capture(path) as reader:
        strip_capture(reader, str(out), OpSelection(), allow_incomplete=True)
        contents = [bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1)]
        kinds = dict(reader.summary.records)
    check_capture(str(out))
    found = list(bodies(out))
    # Content of zeros but for a byte is in a file by chance now and then.
    telling = [content for content in contents if len(content) - content.count(0) >= 4]
    assert telling or not contents
    assert not any(content in body for content in telling for body in found)
    with open_capture(out) as reader:
        assert len(reader.payloads) == 0 and len(reader.files) == len(reader.file_ranges) == len(reader.recipes) == 1
        same = (RecordKind.op, RecordKind.unsupported, RecordKind.host_read)
        assert {kind: reader.summary.records.get(kind, 0) for kind in same} == {
            kind: kinds.get(kind, 0) for kind in same
        }
