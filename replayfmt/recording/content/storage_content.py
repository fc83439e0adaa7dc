"""Reads a storage's bytes in a running program: to embed them, to hash them, or to make a recipe of them.

A recipe stands in for floating-point content that is left out of a capture: it says how to synthesize similar content.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from replayfmt.format.model import Recipe, Statistics
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.tensors.memory import (
    DTYPE_CODE,
    address_of,
    call_undispatched,
    host_view,
    make_view,
    storage_bytes,
)

from .coverage import ByteRegion
from .file_mappings import MappedRange

_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ: bring pages into memory as reading does, or fail
UNREADABLE_CONTENT = -1
_SAMPLED_WHOLE = 1024  # bytes: up to here a sample is all of a storage; as in native/session.h
_SAMPLED_WORDS = 32  # of 8 bytes each, evenly spaced, from a larger one
_libc = ctypes.CDLL(None, use_errno=True)


def is_readable(storage: torch.UntypedStorage) -> bool:
    """Whether all its bytes can be read. Reads them in; True if the system cannot tell."""
    length = storage.nbytes()
    if storage.device.type != "cpu" or not length or (storage.resizable() and not storage.is_shared()):
        return True  # memory that torch allocates is not in a file
    begin = address_of(storage)
    first = begin - begin % mmap.PAGESIZE
    failed = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + length - first), _POPULATE_READ)
    return not failed or ctypes.get_errno() != errno.EFAULT


def content_hash(storage: torch.UntypedStorage) -> int:
    """The XXH3-128 of all its bytes; if they cannot be read, a value that no content has."""
    return _hash(storage) if storage.device.type == "cpu" else call_undispatched(_hash, storage)


def content_of(storage: torch.UntypedStorage) -> int | None:
    """A number that identifies the content of a whole storage, of which a kernel may write any byte; None if it cannot
    be read."""
    number = content_hash(storage)
    return None if number == UNREADABLE_CONTENT else number


def content_number(storage: torch.UntypedStorage, mapped: MappedRange | None) -> int:
    """A number that identifies a storage's content. In a file's memory (`mapped`), only written pages are read."""
    fingerprint = None if mapped is None else mapped.fingerprint()
    return content_hash(storage) if fingerprint is None else fingerprint


def content_beside(storage: torch.UntypedStorage, regions: Sequence[ByteRegion]) -> int | None:
    """A number that identifies what host memory holds beside regions; None if one of them is all of it, or too long."""
    length = storage.nbytes()
    regions = [region.once() for region in regions if not region.empty]
    spans = [region.dense() for region in regions]
    if not regions or (0, length) in spans or max(region.end for region in regions) > length:
        return None
    if not is_readable(storage):
        return None
    content = host_view(storage)
    if len(spans) == 1 and spans[0] is not None:
        beside = xxhash.xxh3_64(content[: spans[0][0]])
        beside.update(content[spans[0][1] :])
        return beside.intdigest()
    copy = np.frombuffer(content, np.uint8).copy()
    for region in regions:
        np.ndarray((*region.sizes, region.item), np.uint8, copy, region.start, (*region.strides, 1))[...] = 0
    return xxhash.xxh3_64_intdigest(copy.data)


def sample(storage: torch.UntypedStorage) -> bytes:
    """Some of a storage's bytes, at places that depend on its length alone; none if it is not in host memory."""
    length = storage.nbytes()
    if storage.device.type != "cpu" or not length:
        return b""
    content = host_view(storage)
    if length <= _SAMPLED_WHOLE:
        return bytes(content)
    return np.ndarray((_SAMPLED_WORDS, 8), np.uint8, content, 0, (_sample_step(length), 1)).tobytes()


def sampled_places(length: int) -> list[tuple[int, int, int]]:
    """Where the bytes of such a sample come from: (first byte in the sample, first byte in the storage, bytes)."""
    if length <= _SAMPLED_WHOLE:
        return [(place, place, 1) for place in range(length)]
    return [(8 * word, _sample_step(length) * word, 8) for word in range(_SAMPLED_WORDS)]


def _sample_step(length: int) -> int:
    return (length - 8) // (_SAMPLED_WORDS - 1)


def embed(writer: CaptureWriter, storage: torch.UntypedStorage) -> int:
    """The payload id of all its bytes. Raises CaptureFailed if they cannot be written."""
    return _embed(writer, storage) if storage.device.type == "cpu" else call_undispatched(_embed, writer, storage)


def is_monotonous(storage: torch.UntypedStorage) -> bool:
    """Whether all its bytes are the same."""
    return call_undispatched(_is_monotonous, storage)


def _is_monotonous(storage: torch.UntypedStorage) -> bool:
    content = storage_bytes(storage)
    return content[1:] == content[:-1]


def _hash(storage: torch.UntypedStorage) -> int:
    return xxhash.xxh3_128_intdigest(storage_bytes(storage)) if is_readable(storage) else UNREADABLE_CONTENT


def _embed(writer: CaptureWriter, storage: torch.UntypedStorage) -> int:
    return writer.payload(storage_bytes(storage))


_AT_ONCE = 1 << 21  # elements


def is_synthesized(dtype: torch.dtype) -> bool:
    """Whether content of this dtype is left out if only integers are embedded."""
    return dtype.is_floating_point or dtype.is_complex


def recipe(storage: torch.UntypedStorage, dtype: torch.dtype, number: int, *, statistics: bool = True) -> Recipe:
    """The recipe for a storage, the capture's `number`th that needs one. `statistics`: include them."""
    elements = storage.nbytes() // dtype.itemsize
    seed = xxhash.xxh3_64_intdigest(f"recipe {number}".encode())
    return Recipe(
        DTYPE_CODE[dtype], elements, seed, _statistics_or_none(storage, dtype, elements) if statistics else None
    )


def _statistics_or_none(storage: torch.UntypedStorage, dtype: torch.dtype, elements: int) -> Statistics | None:
    try:
        return call_undispatched(_statistics, storage, dtype, elements)
    except (NotImplementedError, RuntimeError, TypeError):
        return None  # a dtype that this build cannot convert; the format knows what that means


def _statistics(storage: torch.UntypedStorage, dtype: torch.dtype, elements: int) -> Statistics:
    values = make_view(storage, dtype, (elements,), (1,))
    finite, mean, squares = 0, 0.0, 0.0
    low, high = math.inf, -math.inf
    zeros = nans = above = below = 0
    for begin in range(0, values.numel(), _AT_ONCE):
        part = values[begin : begin + _AT_ONCE]
        parts = torch.view_as_real(part) if part.is_complex() else part.unsqueeze(-1)
        parts = parts.to(torch.float64, copy=True)  # the program may write meanwhile, and the counts must agree
        unknown = parts.isnan().any(-1)
        plus = (parts == math.inf).any(-1) & ~unknown
        minus = (parts == -math.inf).any(-1) & ~unknown & ~plus
        zeros += int((parts == 0).all(-1).sum())
        nans, above, below = nans + int(unknown.sum()), above + int(plus.sum()), below + int(minus.sum())
        finite_parts = parts[parts.isfinite()]
        count = finite_parts.numel()
        if count:
            low, high = min(low, float(finite_parts.min())), max(high, float(finite_parts.max()))
            part_mean = float(finite_parts.mean())
            part_squares = float((finite_parts - part_mean).square().sum())
            difference = part_mean - mean
            mean += difference * count / (finite + count)
            squares += part_squares + difference * difference * finite * count / (finite + count)
            finite += count
    if not finite:
        return Statistics(math.nan, math.nan, math.nan, math.nan, zeros, nans, above, below)
    return Statistics(mean, math.sqrt(squares / finite), low, high, zeros, nans, above, below)
