"""What the tests of content share: where each storage that came from outside has its bytes."""

from __future__ import annotations

from pathlib import Path

from replayfmt.format.codes import StorageOrigin
from replayfmt.format.model import ExternalFile, FileRange, Recipe

from .conftest import Captured

_FROM_OUTSIDE = (StorageOrigin.payload, StorageOrigin.external_file, StorageOrigin.initializer, StorageOrigin.absent)


def origins(captured: Captured) -> list[str]:
    """The origins of the storages that came from outside, in order of their first use."""
    with captured.reader as reader:
        storages = [reader.storage(number) for number in range(1, reader.storage_count + 1)]
        return [storage.origin.name for storage in storages if storage.origin in _FROM_OUTSIDE]


def ranges(captured: Captured) -> list[tuple[ExternalFile, FileRange]]:
    """Every range that the capture knows, with its file."""
    with captured.reader as reader:
        return [(reader.files[found.file], found) for found in list(reader.file_ranges)[1:]]


def recipes(captured: Captured) -> list[Recipe]:
    with captured.reader as reader:
        return list(reader.recipes)[1:]


def payload_bytes(captured: Captured) -> list[bytes]:
    """The content of every payload."""
    with captured.reader as reader:
        return [bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1)]


def range_bytes(captured: Captured) -> list[bytes]:
    """What the files hold now in the ranges that the capture refers to."""
    return [Path(file.path).read_bytes()[place.offset : place.offset + place.bytes] for file, place in ranges(captured)]
