"""The body of a graph of a device: the ops that were captured into it, as a capture inside of a capture.

It is an attachment of the graph's kernel. Its records are ops, and the events that order its streams; stream 0 is the
one that it was captured on. Its storages are what the graph uses: those whose origin is `absent` existed before, those
of the origin `payload` are tensors of the host that an op was given by value, and the others were allocated by the
graph. An argument of the kernel is a tensor on one of them and is named after it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replayfmt.errors import CaptureFailed, InvalidCapture, OpReplayError

from .attachments import BODY, METADATA, contents_of
from .codes import KernelKind, RecordKind
from .reader import CaptureReader, open_capture

BODY_SESSION = "00000000-0000-0000-0000-000000000000"  # a body has no session of its own, and the same ops one form
VERSION = 1
_SHOWN = 4
_IN_BODIES = (RecordKind.op, RecordKind.event_record, RecordKind.event_wait)
_ARGUMENT = re.compile(r"s([1-9][0-9]{0,17})(?:_[0-9]{1,9})?")


def argument_name(storage: int, which: int) -> str:
    """The name of the argument that is the tensor number `which` on a storage of the body."""
    return f"s{storage}_{which}" if which else f"s{storage}"


def storage_of_argument(name: str) -> int:
    """The storage of the body that an argument is on. Raises ValueError for the name of no argument."""
    found = _ARGUMENT.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!a} names no storage of a graph")
    return int(found.group(1))


def open_body(contents: Mapping[str, bytes]) -> CaptureReader:
    """The body among a kernel's attachments by role, for the caller to close. Raises ValueError if there is none that
    can be read, or if it holds anything but ops of operators and of kernels that are no graphs, and events."""
    if BODY not in contents:
        raise ValueError("the capture has no body of it")
    try:
        with tempfile.TemporaryDirectory(prefix="opreplay-") as folder:
            path = Path(folder, "body.opreplay")
            path.write_bytes(contents[BODY])
            try:
                reader = open_capture(path)
            except OpReplayError as error:
                raise ValueError(f"its body cannot be read ({str(error).replace(str(path), 'body')})") from None
    except OSError as error:
        where = os.environ.get("TMPDIR") or "the folder for temporary files"
        raise CaptureFailed(
            f"the body of a graph needs {len(contents[BODY])} bytes of temporary space in {where}: {error.strerror}; "
            "set TMPDIR to a folder with room"
        ) from None
    try:
        _check(reader)
    except BaseException:
        reader.close()
        raise
    return reader


def _check(reader: CaptureReader) -> None:
    if not reader.complete:
        raise ValueError(f"its body is incomplete ({reader.incomplete_reason})")
    for kernel in reader.kernels:
        if kernel is not None and kernel.kind in (KernelKind.graph, KernelKind.collective):
            raise ValueError(f"its body calls {kernel.qualified_name}, a kernel of the kind {kernel.kind.name}")
    try:
        others = {record.kind.name for record in reader.records() if record.kind not in _IN_BODIES}
    except InvalidCapture as error:
        raise ValueError(f"its body cannot be read ({error})") from None
    if others:
        raise ValueError(f"its body holds records of other kinds than ops and events: {', '.join(sorted(others))}")


def body_metadata(reader: CaptureReader, device: str, streams: int, draws: bool, unchecked: str) -> dict[str, Any]:
    """What is said of a graph besides its ops: the device that it was captured on, the number of streams that its ops
    were issued to, whether they draw random numbers, and why it could not be checked that the graph held nothing but
    them ("" if it was)."""
    ops = (record for record in reader.records() if record.kind is RecordKind.op)
    calls = Counter(reader.kernels[record.signature.kernel].qualified_name for record in ops)
    return {
        "kind": "graph",
        "version": VERSION,
        "device": device,
        "streams": streams,
        "draws": draws,
        "unchecked": unchecked,
        "ops": sum(calls.values()),
        "kernels": dict(sorted(calls.items())),
    }


def only_inside(reader: CaptureReader, fits: Callable[[str], bool]) -> str:
    """A hint at the bodies whose kernels a selection means, for one that matches nothing else: "" if it means none.
    `fits` judges names, without and with overload."""
    found: dict[str, list[str]] = {}
    for kernel in reader.kernels:
        if kernel is None or kernel.kind is not KernelKind.graph:
            continue
        try:
            inside = parse_body_metadata(contents_of(reader, kernel)).get("kernels")
        except (InvalidCapture, ValueError):
            continue
        for name in inside if isinstance(inside, dict) else ():
            if fits(name.rpartition(".")[0]) or fits(name):
                bodies = (str(number) for number in kernel.attachments if reader.attachments[number].role == BODY)
                found.setdefault(
                    f"{kernel.name} (its body: opreplay-dump --attachment={', '.join(bodies)})", []
                ).append(name)
    if not found:
        return ""
    names = sorted({name for inside in found.values() for name in inside})
    return f"{_some(names)} {'is' if len(names) == 1 else 'are'} called only inside of {_some(list(found))}"


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def parse_body_metadata(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """The metadata among a graph's attachments. Raises ValueError if there are none of this version."""
    try:
        metadata = json.loads(contents[METADATA])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"it has no metadata that can be read ({error!r})") from None
    if not isinstance(metadata, dict) or metadata.get("kind") != "graph" or metadata.get("version") != VERSION:
        raise ValueError(f"its metadata are not those of a graph of version {VERSION}")
    if type(metadata.get("streams")) is not int or type(metadata.get("draws")) is not bool:
        raise ValueError("its metadata do not say how many streams it uses, or whether it draws")
    if type(metadata.setdefault("unchecked", "it was recorded without")) is not str:
        raise ValueError("its metadata do not say whether it was checked for work that was not recorded")
    return metadata
