"""Captures whose imported content stands in external files instead: made of ordinary ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.external_files import digest_file
from replayfmt.format.model import ExternalFile, FileIdentity, FileRange, Node, PayloadValue, Record, Signature
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.writer import CaptureWriter

from .rewriting import rewrite


def imported_payloads(reader: CaptureReader) -> list[int]:
    """The payloads that storage imports bring in, in order."""
    found: dict[int, None] = {}
    for record in reader.records():
        if record.kind is RecordKind.storage_import:
            payload = record.argument("payload")
            assert isinstance(payload, PayloadValue)
            found[payload.id] = None
    return list(found)


def content_file(source: Path, path: Path, *, gap: int = 64, only: list[int] | None = None) -> dict[int, int]:
    """Write the imported payloads of a capture to a file, each at a multiple of `gap`; their offsets by payload id."""
    content, offsets = bytearray(b"header".ljust(gap, b"\0")), {}
    with open_capture(source) as reader:
        for number in only if only is not None else imported_payloads(reader):
            offsets[number] = len(content)
            content += bytes(reader.payload(number))
            content += bytes(-len(content) % gap)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))  # long ago, so that a later change shows however slowly the clock ticks
    return offsets


def described(path: Path, validation: str, named: str | None = None) -> ExternalFile:
    """The file as a capture describes it: with `identity`, `digest`, both or `none`."""
    found = os.stat(path)
    identity = FileIdentity(found.st_dev, found.st_ino, found.st_mtime_ns) if "identity" in validation else None
    digest = digest_file(path) if "digest" in validation else None
    return ExternalFile(named or str(path), found.st_size, identity, digest, format="raw")


def externalize(
    source: Path,
    target: Path,
    files: dict[Path, dict[int, int]],
    validation: str = "identity",
    *,
    named: Callable[[Path], str] = str,
    embed: str = "",
    reason: str = "first_use",
) -> Path:
    """The capture with the payloads in `files` (path → offsets by payload id) referred to instead of embedded.

    `named` gives the path that the capture says; `embed` is `ranges` or `all` to keep the bytes in it as well; `reason`
    is that of first imports.
    """
    ranges: dict[int, int] = {}

    def prepare(reader: CaptureReader, writer: CaptureWriter) -> None:
        for path, offsets in files.items():
            whole = writer.payload(path.read_bytes()) if embed == "all" else 0
            file = writer.file(replace(described(path, validation, named(path)), payload=whole))
            for payload, offset in offsets.items():
                length = reader.payload_info(payload).raw_bytes
                ranges[payload] = writer.range(FileRange(file, offset, length, payload if embed == "ranges" else 0))

    def signature(one: Signature) -> Signature:
        if one.kind is not RecordKind.storage_import:
            return one
        return replace(
            one,
            args=tuple(
                Node(ValueKind.range, node.name)
                if node.kind is ValueKind.payload
                else replace(node, constant=reason)
                if node.constant == "first_use"
                else node
                for node in one.args
            ),
        )

    def change(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.storage_import:
            at = [node.name for node in record.signature.args if node.kind is not ValueKind.string].index("payload")
            ints[at] = ranges[ints[at]]

    def births(origins: np.ndarray, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        moved = origins == StorageOrigin.payload
        contents = contents.copy()
        contents[moved] = [ranges[payload] for payload in contents[moved].tolist()]
        return np.where(moved, np.uint8(StorageOrigin.external_file), origins), contents

    return rewrite(source, target, change=change, signature=signature, prepare=prepare, births=births)
