"""Mapped files: which file is mapped at a range of addresses, and whether the bytes there are still the file's.

A page of a private mapping is the file's own until it is written; then the process gets a copy. Linux distinguishes the
two without reading their bytes: in /proc/self/pagemap for each page, or in /proc/self/smaps for a whole mapping if the
former cannot be read. These lookups do not bring pages into memory. Imports no torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import re
import stat
import struct
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import FileIO

import numpy as np
import xxhash

from replayfmt.format.model import FileIdentity
from replayfmt.pytorch.tensors.memory import memory_at

PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"
_SMAPS = "/proc/self/smaps"
_ADDRESS_MAPS = "/proc/self/maps"
_MAPPED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ", re.MULTILINE)
_HEAP = re.compile(rb"^([0-9a-f]+)-[0-9a-f]+ .*\[heap\]$", re.MULTILINE)
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
        with open(_ADDRESS_MAPS, "rb") as file:
            mapped = _MAPPED.finditer(file.read())
    except OSError:
        return False
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in (each.groups() for each in mapped))


def holds_no_file(address: int, length: int) -> bool:
    """Whether nothing in [address, address + length) is mapped from a file, or shared with another process; False if
    the system does not say."""
    try:
        in_heap = heap_begin() <= address and address + length <= _sbrk(0)
        return in_heap or _mapping_from(address, _COVERING_OR_NEXT | _OF_A_FILE_ONLY)[0] >= address + length
    except OSError:
        return False


_sbrk = ctypes.PyDLL(None).sbrk
_sbrk.restype = ctypes.c_size_t


@functools.cache
def heap_begin() -> int:
    """From here to the program break there is memory that malloc hands out, and it never gives that back for a mapping
    to take its place. Raises OSError if the system does not say. In a process whose executable is at a fixed address,
    as Debian's python3 is, this is below 4 GiB; else it is far above."""
    with open(_ADDRESS_MAPS, "rb") as file:
        heap = _HEAP.search(file.read())
    return int(heap[1], 16) if heap else int(_sbrk(0))


def begins_heap_block(address: int) -> bool:
    """Whether the memory at an address of the heap looks like the begin of a block that glibc's malloc handed out: by
    its own head and the one behind it (malloc.c, "Chunk representation"). So does one in 200 of all
    numbers in the range of the heap, and one in 15 of the multiples of 16."""
    try:
        end = int(_sbrk(0))
        if address % 16 or not heap_begin() + 16 <= address < end:
            return False
        with open("/proc/self/mem", "rb", buffering=0) as memory:  # an address that is gone meanwhile is an OSError
            size, flags = divmod(_word(memory, address - 8), 16)
            return flags < 2 and 2 <= size < (end - address) // 16 and _word(memory, address - 8 + 16 * size) % 16 == 1
    except OSError:
        return False


def _word(memory: FileIO, address: int) -> int:
    return int.from_bytes(os.pread(memory.fileno(), 8, address), "little")


def _mapping_from(address: int, flags: int) -> tuple[int, int]:
    """The bounds of the mapping that an address is in, or of the next one; (2^64, 2^64) if there is none. Raises
    OSError if the system cannot be asked."""
    asked = bytearray(_QUERY_BYTES)
    struct.pack_into("=QQQ", asked, 0, _QUERY_BYTES, flags, address)
    descriptor = os.open(_ADDRESS_MAPS, os.O_RDONLY | os.O_CLOEXEC)
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


def _has_none(start: int, *names: str) -> bool:
    """Whether the mapping that starts at an address is known to have no pages of these kinds, as smaps calls them."""
    sizes = mapping_sizes(start)
    return sizes is not None and all(sizes.get(name) == 0 for name in names)


_COPIED = ("Anonymous", "Swap")  # private copies
_DIRTY = ("Shared_Dirty", "Private_Dirty")  # they differ from the disk
_MAPS = "/proc/self/maps"
_MOUNTS = "/proc/self/mountinfo"
# These update the modification time when a clean page of a shared mapping is written.
_TELLING = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
# On these, a mapping of a file and the file at its path share the same memory. Not so on layered file systems
# (overlayfs), where the first write to a file makes a copy that takes over its path and its numbers; others are
# unknown.
_ONE = _TELLING | {"tmpfs", "ramfs"}
_CLOCK_S = 2  # possible error of the process start time that the kernel reports
_CHUNK_BYTES = 4 << 20

Bytes = Callable[[int, int], memoryview]


def identity_of(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/self/maps, or several that continue each other."""

    start: int
    end: int
    shared: bool
    writable: bool
    offset: int  # in the file
    device: str
    inode: int
    path: str

    @property
    def file(self) -> tuple[str, int]:
        """The file's device and inode according to the kernel's maps. On some file systems these differ from stat's."""
        return self.device, self.inode


def read_mappings() -> list[Mapping]:
    """Every file mapping of this process, by address; none if the system does not report them."""
    try:
        with open(_MAPS, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return []
    mappings: list[Mapping] = []
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            continue
        start, end = (int(part, 16) for part in fields[0].split(b"-"))
        path = os.fsdecode(fields[5].replace(b"\\012", b"\n"))
        mapping = Mapping(
            start,
            end,
            fields[1][3:4] == b"s",
            fields[1][1:2] == b"w",
            int(fields[2], 16),
            fields[3].decode(),
            int(fields[4]),
            path,
        )
        mappings.append(mapping)
    return mappings


@dataclass
class MappedRange:
    """An address range that held a file's bytes, untouched, when it was found."""

    path: str
    address: int
    bytes: int
    offset: int  # in the file
    file_bytes: int
    identity: FileIdentity
    mapping: Mapping

    def fingerprint(self) -> int | None:
        """Changes when the bytes may have changed, as long as only the caller's own operators write to memory shared
        with the file. Reads only pages that were written in memory. None if the system does not report it."""
        modified = self._modified()
        if self.mapping.shared:
            return modified
        written = own_pages(self)
        if written is None:
            return None
        if not written.any():
            return modified
        state = xxhash.xxh3_128(f"{modified}".encode())
        state.update(np.packbits(written).tobytes())
        for begin, end in _runs(written):
            low = max(self.address, first_page(self.address) + begin * PAGE)
            high = min(self.address + self.bytes, first_page(self.address) + end * PAGE)
            state.update(memory_at(low, high - low))
        return state.intdigest()

    def _modified(self) -> int:
        """The file's modification time. A file that has lost its path since still holds its content for those who
        mapped it."""
        try:
            status = os.stat(self.path)
        except OSError:
            return self.identity.mtime_ns
        same = (status.st_dev, status.st_ino) == (self.identity.device, self.identity.inode)
        return status.st_mtime_ns if same else self.identity.mtime_ns


def own_pages(found: MappedRange) -> np.ndarray | None:
    """For each page of a range of a private mapping, whether it is no longer the file's. None if unknown.

    The first and the last page may also hold other data, which its owner may have written: only the range's part
    counts.
    """
    written = written_pages(found.address, found.bytes)
    if written is None:
        return None
    if written[0] or written[-1]:
        page = first_page(found.address)
        for index in {0, len(written) - 1}:
            low = max(found.address, page + index * PAGE)
            high = min(found.address + found.bytes, page + (index + 1) * PAGE)
            if written[index] and (low, high) != (page + index * PAGE, page + (index + 1) * PAGE):
                written[index] = not _same_as_file(found, low, high)
    return written


def _same_as_file(found: MappedRange, low: int, high: int) -> bool:
    try:
        descriptor = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if identity_of(os.fstat(descriptor)) != found.identity:
            return False
        return os.pread(descriptor, high - low, found.offset + low - found.address) == bytes(memory_at(low, high - low))
    except OSError:
        return False
    finally:
        os.close(descriptor)


class FileMappings:
    """Finds the files behind addresses. Remembers mappings only as long as the caller proves that they still exist."""

    def __init__(self) -> None:
        self._lasting: list[tuple[Mapping, Callable[[], object | None]]] = []
        self._files: list[tuple[int, int]] | None = None  # where files were mapped at the last lookup, in order

    @property
    def available(self) -> bool:
        """Whether the system reports mappings at all."""
        return os.access(_MAPS, os.R_OK)

    def find(self, address: int, length: int) -> MappedRange | None:
        """The file whose untouched bytes are at [address, address + length), or None."""
        if holds_no_file(address, length):
            return None
        written = written_pages(address, 1)
        # A file's page that is only partly in the range may have been written in its other part. But most such pages
        # are ordinary memory (NumPy arrays, say), and reading all mappings for each, as before Linux 6.11, would take
        # too long.
        if written is not None and written[0] and (address % PAGE == 0 or self._held_no_file(address, length)):
            return None
        mapping = self._lasting_around(address, length)
        if mapping is None:
            mappings = read_mappings()
            mapping = _joined([m for m in mappings if m.start < address + length and address < m.end], address, length)
            if mapping is None:
                self._files = [(each.start, each.end) for each in mappings]
                return None
            if not _writes_show(mapping, mappings):
                return None
        status = _file_behind(mapping)
        offset = mapping.offset + address - mapping.start
        if status is None or offset + length > status.st_size:
            return None
        found = MappedRange(mapping.path, address, length, offset, status.st_size, identity_of(status), mapping)
        if not mapping.shared and not _untouched(found):
            return None
        return found if _is_current(found, status) else None

    def holds_no_file(self, address: int, length: int) -> bool:
        """Whether nothing in [address, address + length) is mapped from a file, or shared with another process."""
        if holds_no_file(address, length):
            return True
        written = written_pages(address, length)  # before Linux 6.11
        return written is not None and bool(written.all()) and self._held_no_file(address, length)

    def _held_no_file(self, address: int, length: int) -> bool:
        """Whether no file was mapped there at the last lookup, of which there may be none yet."""
        if self._files is None:
            return False
        place = bisect_left(self._files, (address + length, 0))
        return place == 0 or self._files[place - 1][1] <= address

    def is_file(self, address: int, length: int) -> bool:
        """Whether any of [address, address + length) is mapped from a file, even if the file changed since. The special
        files of shared memory do not count; ordinary files stored there do."""
        return not holds_no_file(address, length) and any(
            not (mapping.shared and mapping.path.startswith(("/dev/", "/memfd:")))
            for mapping in read_mappings()
            if mapping.start < address + length and address < mapping.end
        )

    def keep(self, found: MappedRange, alive: Callable[[], object | None]) -> None:
        """`alive` returns something other than None as long as the memory of a range stays mapped."""
        self._lasting = [pair for pair in self._lasting if pair[1]() is not None]
        if all(found.mapping is not mapping for mapping, _ in self._lasting):
            self._lasting.append((found.mapping, alive))

    def _lasting_around(self, address: int, length: int) -> Mapping | None:
        for mapping, alive in self._lasting:
            if mapping.start <= address and address + length <= mapping.end and alive() is not None:
                return mapping
        return None


def _writes_show(mapping: Mapping, mappings: list[Mapping]) -> bool:
    """Whether the file was not written through this process's memory, and later writes will be noticed."""
    writers = [m for m in mappings if m.shared and m.writable and m.file == mapping.file]
    if not writers:
        return True
    status = _file_behind(mapping)
    return (
        status is not None
        and _file_system(status.st_dev) in _TELLING
        and all(_has_none(writer.start, *_DIRTY) for writer in writers)
    )


def _untouched(found: MappedRange) -> bool:
    """Whether every byte of a range of a private mapping is still the file's."""
    written = own_pages(found)
    if written is not None:
        return not written.any()
    # Then it is only known whether any of the mapping was written.
    mapping = found.mapping
    pieces = [m for m in read_mappings() if m.start < mapping.end and mapping.start < m.end]
    return all(_has_none(piece.start, *_COPIED) for piece in pieces)


def _joined(pieces: list[Mapping], address: int, length: int) -> Mapping | None:
    """Adjacent mappings of one file as one, if together they hold a whole range."""
    if not pieces or pieces[0].start > address or pieces[-1].end < address + length:
        return None
    first = pieces[0]
    for before, piece in zip(pieces, pieces[1:], strict=False):
        continues = piece.start == before.end and piece.offset == before.offset + before.end - before.start
        if not continues or (piece.file, piece.path, piece.shared) != (first.file, first.path, first.shared):
            return None
    return replace(first, end=pieces[-1].end, writable=any(piece.writable for piece in pieces))


def _file_behind(mapping: Mapping) -> os.stat_result | None:
    """The status of the mapped file, if it still has its path."""
    try:
        status = os.stat(mapping.path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    if (device, status.st_ino) == mapping.file:
        return status
    # Layered file systems (overlayfs, btrfs) report different file numbers in maps and in stat: map the file and
    # compare.
    try:
        descriptor = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        with mmap.mmap(descriptor, 1, access=mmap.ACCESS_COPY) as probe:
            first_byte = ctypes.c_char.from_buffer(probe)
            address = ctypes.addressof(first_byte)
            files = [m.file for m in read_mappings() if m.start <= address < m.end]
            del first_byte  # a mapping in use cannot be closed
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return status if files == [mapping.file] else None


def _is_current(found: MappedRange, status: os.stat_result) -> bool:
    """Whether the mapped file is the one at its path, bytes included. The bytes are compared only if they can differ:
    on file systems not known to share their memory, and if the file was touched while this process ran."""
    if _file_system(status.st_dev) in _ONE:
        return True
    started = _process_start()
    if started is not None and max(status.st_mtime, status.st_ctime) < started - _CLOCK_S:
        return True
    step = range(found.address, found.address + found.bytes, _CHUNK_BYTES)
    return all(_same_as_file(found, low, min(low + _CHUNK_BYTES, found.address + found.bytes)) for low in step)


def _process_start() -> float | None:
    """When this process started, in seconds since 1970; None if the system does not report it."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/stat", "rb") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def _file_system(device: int) -> str | None:
    """The type of the file system with this device number, if known."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, described = line.partition(" - ")
        if fields.split()[2] == wanted:
            return described.split()[0]
    return None


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """The begin and end of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
