"""A storage's bytes as the recorder needs them of a running program: embedded, or as a hash to compare with.

Memory of a file that was made shorter meanwhile ends the process that touches it. The program may know better than to
do so, and recording must not: the system is asked first, where it can be (Linux 5.14).
"""

from __future__ import annotations

import ctypes
import errno
import mmap

import torch
import xxhash

from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.tensors.memory import call_undispatched, storage_bytes

from .file_mappings import MappedRange

_POPULATE_READ = 22  # Linux's MADV_POPULATE_READ: bring pages into memory as reading does, or say that it cannot be
_UNREADABLE = -1
_libc = ctypes.CDLL(None, use_errno=True)


def is_readable(storage: torch.UntypedStorage) -> bool:
    """Whether all its bytes can be read. Reads them in; True if the system does not show it."""
    length = storage.nbytes()
    if storage.device.type != "cpu" or not length or (storage.resizable() and not storage.is_shared()):
        return True  # what torch allocates is in no file
    begin = storage.data_ptr()
    first = begin - begin % mmap.PAGESIZE
    failed = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + length - first), _POPULATE_READ)
    return not failed or ctypes.get_errno() != errno.EFAULT


def content_hash(storage: torch.UntypedStorage) -> int:
    """The XXH3-128 of all its bytes; one that nothing has where they cannot be read."""
    return call_undispatched(_hash, storage)


def content_number(storage: torch.UntypedStorage, mapped: MappedRange | None) -> int:
    """A number for what a storage holds. Of a file's memory (`mapped`) only what was written is read."""
    fingerprint = None if mapped is None else mapped.fingerprint()
    return content_hash(storage) if fingerprint is None else fingerprint


def embed(writer: CaptureWriter, storage: torch.UntypedStorage) -> int:
    """The payload id of all its bytes. Raises CaptureFailed if they cannot be written."""
    return call_undispatched(_embed, writer, storage)


def is_monotonous(storage: torch.UntypedStorage) -> bool:
    """Whether all its bytes are the same."""
    return call_undispatched(_is_monotonous, storage)


def _is_monotonous(storage: torch.UntypedStorage) -> bool:
    content = storage_bytes(storage)
    return content[1:] == content[:-1]


def _hash(storage: torch.UntypedStorage) -> int:
    return xxhash.xxh3_128_intdigest(storage_bytes(storage)) if is_readable(storage) else _UNREADABLE


def _embed(writer: CaptureWriter, storage: torch.UntypedStorage) -> int:
    return writer.payload(storage_bytes(storage))
