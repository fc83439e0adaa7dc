"""Which memory of this process is mapped, which is mapped from a file, and which pages of that were written since.

A page of a private mapping is the file's own until it is written; then the process gets a copy. Linux distinguishes the
two without reading their bytes: in /proc/self/pagemap for each page, or in /proc/self/smaps for a whole mapping if the
former cannot be read. These lookups do not bring pages into memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct

import numpy as np

PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"
_SMAPS = "/proc/self/smaps"
_MAPS = "/proc/self/maps"
_MAPPED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ", re.MULTILINE)
_QUERY, _QUERY_BYTES = 0xC0686611, 104  # PROCMAP_QUERY, which Linux has since 6.11
_COVERING_OR_NEXT, _OF_A_FILE_ONLY = 0x10, 0x20
_ENTRY = 8  # bytes per page
_AT_ONCE = 1 << 18  # pages
_STATE = np.uint64(7 << 61)  # whether a page is present, swapped out, and file-backed: bits 63, 62 and 61
_OF_A_FILE = np.uint64(1 << 61)
_PRESENT_OF_A_FILE = np.uint64(5 << 61)
_HEADER = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ ", re.MULTILINE)
_FIELD = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


def first_page(address: int) -> int:
    """The address of the page that contains an address."""
    return address - address % PAGE


def is_mapped(address: int) -> bool:
    """Whether an address is in the memory of this process; False if the system does not say."""
    try:
        return _mapping_from(address, _COVERING_OR_NEXT)[0] <= address
    except OSError:
        pass  # before Linux 6.11
    try:
        with open(_MAPS, "rb") as file:
            mapped = _MAPPED.finditer(file.read())
    except OSError:
        return False
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in (each.groups() for each in mapped))


def holds_no_file(address: int, length: int) -> bool:
    """Whether nothing in [address, address + length) is mapped from a file, or shared with another process; False if
    the system does not say."""
    try:
        return _mapping_from(address, _COVERING_OR_NEXT | _OF_A_FILE_ONLY)[0] >= address + length
    except OSError:
        return False


def _mapping_from(address: int, flags: int) -> tuple[int, int]:
    """The bounds of the mapping that an address is in, or of the next one; (2^64, 2^64) if there is none. Raises
    OSError if the system cannot be asked."""
    asked = bytearray(_QUERY_BYTES)
    struct.pack_into("=QQQ", asked, 0, _QUERY_BYTES, flags, address)
    descriptor = os.open(_MAPS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _QUERY, asked)
    except FileNotFoundError:
        return 1 << 64, 1 << 64
    finally:
        os.close(descriptor)
    start, end = struct.unpack_from("=QQ", asked, 24)
    return start, end


def written_pages(address: int, length: int) -> np.ndarray | None:
    """For each page that [address, address + length) touches, whether it is a private copy of this process. None if the
    system does not report it."""
    first = address // PAGE
    count = (address + length - 1) // PAGE - first + 1
    written = np.empty(count, bool)
    try:
        descriptor = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for begin in range(0, count, _AT_ONCE):
            pages = min(_AT_ONCE, count - begin)
            data = os.pread(descriptor, pages * _ENTRY, (first + begin) * _ENTRY)
            if len(data) != pages * _ENTRY:
                return None
            state = np.frombuffer(data, np.uint64) & _STATE
            # A page that is neither in memory nor swapped out will be read from the file when it is touched.
            written[begin : begin + pages] = (state > _OF_A_FILE) & (state != _PRESENT_OF_A_FILE)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return written


def mapping_sizes(start: int) -> dict[str, int] | None:
    """The smaps values of the mapping that starts at an address, in bytes by name. None if there are none."""
    try:
        with open(_SMAPS, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except OSError:
        return None
    for header in _HEADER.finditer(text):
        if int(header[1], 16) == start:
            following = _HEADER.search(text, header.end())
            block = text[header.end() : following.start() if following else len(text)]
            return {name: int(kilobytes) * 1024 for name, kilobytes in _FIELD.findall(block)}
    return None


def private_copies(start: int) -> bool | None:
    """Whether the private mapping that starts at an address has private copies of pages. None if unknown."""
    sizes = mapping_sizes(start)
    if sizes is None or "Anonymous" not in sizes or "Swap" not in sizes:
        return None
    return bool(sizes["Anonymous"] or sizes["Swap"])


def dirty(start: int) -> bool | None:
    """Whether the mapping that starts at an address has pages that differ from the disk. None if unknown."""
    sizes = mapping_sizes(start)
    if sizes is None or "Shared_Dirty" not in sizes or "Private_Dirty" not in sizes:
        return None
    return bool(sizes["Shared_Dirty"] or sizes["Private_Dirty"])
