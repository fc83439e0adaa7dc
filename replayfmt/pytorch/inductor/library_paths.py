"""Takes the paths of the machine that compiled a library out of it: a capture may be shared."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

_HEADER = struct.Struct("<4sBB10x2HI3QI6H")  # of a file of 64 bits, little-endian
_SECTION = struct.Struct("<2I4Q2I2Q")
_NO_BITS, _ALLOCATED = 8, 2


def without_paths(library: bytes) -> bytes:
    """The library without debugging information, which nothing loads, and without the directory of PyTorch's headers,
    which messages of errors name; nothing moves."""
    headers = str(Path(torch.__file__).parent).encode()
    return _without_debugging(library).replace(headers, b"/" * len(headers))


def _without_debugging(library: bytes) -> bytes:
    """With zeros in its place. What is no library of this kind, or has none, is returned as it is."""
    if len(library) < _HEADER.size:
        return library
    magic, bits, order, *_kind, offset, _flags, _size, _entry, _entries, entry, count, names = _HEADER.unpack_from(
        library
    )
    end = offset + entry * count
    if (magic, bits, order) != (b"\x7fELF", 2, 1) or entry != _SECTION.size or end > len(library) or names >= count:
        return library
    sections = [_SECTION.unpack_from(library, offset + entry * number) for number in range(count)]
    texts = library[sections[names][4] : sections[names][4] + sections[names][5]]
    changed = bytearray(library)
    for name, kind, flags, _address, begin, length, *_rest in sections:
        debugging = texts[name:].startswith((b".debug", b".zdebug"))
        if debugging and kind != _NO_BITS and not flags & _ALLOCATED and begin + length <= len(library):
            changed[begin : begin + length] = bytes(length)
    return bytes(changed)
