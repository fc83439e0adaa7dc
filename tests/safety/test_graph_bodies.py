"""Graphs whose kernel, call and body do not go together: each is refused before anything runs."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format.samples import IMPORT, SESSION, Records, op, write_everything
from in_process import Tools, tools  # noqa: F401 - a fixture

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import BODY_SESSION, body_metadata
from replayfmt.format.codes import DType, KernelKind, Layout, StorageOrigin, ValueKind
from replayfmt.format.model import Attachment, Device, Kernel, Node, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

V = ValueKind
SCHEMA = "graph::captured_1.v1(Tensor(a0!) s1) -> ()"
NEGATE = Kernel("aten::neg_", "default", "aten::neg_(Tensor(a!) self) -> Tensor(a!)")


def pair_on(records: Records, origin: StorageOrigin, payload: int = 0) -> int:
    """A tensor of two elements on a storage of its own."""
    writer = records.writer
    cpu = writer.device(Device("cpu"))
    meta = writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, (2,), (1,)))
    return records.tensor(records.storage(8, cpu, origin, payload), 0, meta)


def body(path: Path) -> bytes:
    """Of a graph that negates its argument in place."""
    writer = CaptureWriter(path, replace(SESSION, session_id=BODY_SESSION, settings={}))
    records = Records(writer)
    given = pair_on(records, StorageOrigin.absent)
    records.add(op(writer.kernel(NEGATE), (Node(V.tensor, "self"),), (Node(V.tensor),)), (given, given))
    records.write()
    writer.close(1)
    return path.read_bytes()


def metadata(path: Path) -> dict[str, Any]:
    with open_capture(path) as reader:
        return body_metadata(reader, "cpu", 1, False, "")


def capture(
    folder: Path, said: bytes | None = None, inside: bytes | None = None, schema: str = SCHEMA, argument: str = "s1"
) -> Path:
    """A capture that replays the graph once. `said`: its metadata, `inside`: its body."""
    contents = {"body": body(folder / "body"), "metadata": json.dumps(metadata(folder / "body")).encode()}
    contents |= {} if said is None else {"metadata": said}
    contents |= {} if inside is None else {"body": inside}
    writer = CaptureWriter(folder / "graph.opreplay", replace(SESSION, settings={}))
    numbers = tuple(
        writer.attachment(Attachment(role, role, writer.payload(content))) for role, content in contents.items()
    )
    payload = writer.payload(np.array([1.0, -2.0], np.float32).data)
    records = Records(writer)
    tensor = pair_on(records, StorageOrigin.payload, payload)
    records.add(IMPORT, ints=(1, payload, 0))
    kernel = writer.kernel(Kernel("graph::captured_1", "v1", schema, KernelKind.graph, numbers))
    records.add(op(kernel, (Node(V.tensor, argument),)), (tensor,))
    records.write()
    writer.close(1)
    return folder / "graph.opreplay"


def everything(folder: Path) -> bytes:
    """A capture that is no body."""
    write_everything(folder / "everything")
    return (folder / "everything").read_bytes()


Change = Callable[[Path], dict[str, Any]]
HOSTILE: dict[str, tuple[Change, str]] = {
    "an argument that names no storage": (lambda _: {"argument": "x"}, "does not take the arguments ['x']"),
    "a schema that names no storage": (
        lambda _: {"schema": SCHEMA.replace("s1", "x"), "argument": "x"},
        "'x' names no storage of a graph",
    ),
    "a schema of a storage that is not there": (
        lambda _: {"schema": SCHEMA.replace("s1", "s9"), "argument": "s9"},
        "storage 1 of its body is none of its arguments",
    ),
    "a schema that hides what is written": (
        lambda _: {"schema": SCHEMA.replace("(a0!)", "")},
        "writes storage 1, and its schema does not say so",
    ),
    "a number as an argument": (
        lambda _: {"schema": SCHEMA.replace("Tensor(a0!)", "int")},
        "its schema has arguments that are not tensors (s1)",
    ),
    "a list as an argument": (
        lambda _: {"schema": SCHEMA.replace("Tensor(a0!)", "Tensor(a0!)[]")},
        "its schema has arguments that are not tensors (s1)",
    ),
    "a capture of other things as its body": (
        lambda folder: {"inside": everything(folder)},
        "its body holds records of other kinds than ops and events",
    ),
    "no capture as its body": (lambda _: {"inside": b"OPREPLAY"}, "its body cannot be read"),
    "metadata without end": (lambda _: {"said": b"[" * 100_000}, "metadata"),
    "metadata that are a number": (lambda _: {"said": b"NaN"}, "metadata"),
}


def test_a_graph_that_goes_together_is_replayed(tmp_path: Path) -> None:
    assert replayfmt.run(capture(tmp_path), verify="none").outcome == "ok"


@pytest.mark.guarantee("graph-bodies")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_go_together_is_refused(name: str, tmp_path: Path) -> None:
    change, why = HOSTILE[name]
    path = capture(tmp_path, **change(tmp_path))
    for keep_going in (False, True):
        with pytest.raises(ReplayRefused) as caught, replayfmt.Plan(path, keep_going=keep_going) as plan:
            plan.execute(verify="none")
        assert why in " ".join(caught.value.findings), caught.value.findings


def nested(folder: Path, depth: int) -> bytes:
    """A body with a kernel that has such a body, and so on."""
    content = body(folder / "innermost")
    for level in range(depth):
        writer = CaptureWriter(folder / f"body{level}", replace(SESSION, session_id=BODY_SESSION, settings={}))
        number = writer.attachment(Attachment("body", "body", writer.payload(content)))
        records = Records(writer)
        given = pair_on(records, StorageOrigin.absent)
        kernel = writer.kernel(replace(NEGATE, attachments=(number,), kind=KernelKind.triton))
        records.add(op(kernel, (Node(V.tensor, "self"),), (Node(V.tensor),)), (given, given))
        records.write()
        writer.close(1)
        content = (folder / f"body{level}").read_bytes()
    return content


@pytest.mark.slow
def test_bodies_in_bodies_are_left_out_with_the_sources(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = capture(tmp_path, inside=nested(tmp_path, 400))
    done = tools("trim", "--no-sources", path, tmp_path / "out.opreplay")
    assert done.code == 0, done.err
    with open_capture(tmp_path / "out.opreplay") as reader:
        assert [each.role for each in reader.attachments if each is not None] == ["metadata"]


def test_a_check_without_room_for_temporary_files_says_so(
    tmp_path: Path,
    tools: Tools,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_args: Any, **_options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = capture(tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    done = tools("check", path)
    assert done.code == 1 and "No space left on device; set TMPDIR to a folder with room" in done.err
