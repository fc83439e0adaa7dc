"""A storage's bytes as the recorder needs them of a running program: embedded, or as a hash to compare with."""

from __future__ import annotations

import torch
import xxhash

from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.memory import call_undispatched, storage_bytes


def content_hash(storage: torch.UntypedStorage) -> int:
    """The XXH3-128 of all its bytes."""
    return call_undispatched(_hash, storage)


def embed(writer: CaptureWriter, storage: torch.UntypedStorage) -> int:
    """The payload id of all its bytes. Raises CaptureFailed where they cannot be written."""
    return call_undispatched(_embed, writer, storage)


def is_monotonous(storage: torch.UntypedStorage) -> bool:
    """Whether all its bytes are the same."""
    return call_undispatched(_is_monotonous, storage)


def _is_monotonous(storage: torch.UntypedStorage) -> bool:
    content = storage_bytes(storage)
    return content[1:] == content[:-1]


def _hash(storage: torch.UntypedStorage) -> int:
    return xxhash.xxh3_128_intdigest(storage_bytes(storage))


def _embed(writer: CaptureWriter, storage: torch.UntypedStorage) -> int:
    return writer.payload(storage_bytes(storage))
