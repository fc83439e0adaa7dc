"""Files that the user named, as ranges that storages may be copies of.

A range is what a loader would turn into one storage: a tensor of a safetensors file, a storage of a `torch.save`
archive, or a raw file as a whole. Ranges are looked up by length and content; a range's content is hashed once, when a
storage of its length first appears. No file content stays in memory.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from replayfmt.errors import UsageError
from replayfmt.format.model import FileIdentity
from replayfmt.format.validation import parse_json

_INDEX_SUFFIX = ".safetensors.index.json"
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_SAFETENSORS_START = 9  # bytes: the header's length, and the brace it begins with
_ZIP_MAGIC = b"PK\x03\x04"
_ZIP_HEADER_BYTES = 30
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class KnownFile:
    """A file as it was when inspected. `ranges`: offset and length of each."""

    path: str
    bytes: int
    identity: FileIdentity
    format: str
    ranges: tuple[tuple[int, int], ...]


@dataclass
class _Range:
    file: KnownFile
    offset: int
    digest: int | None = None


@dataclass
class KnownFiles:
    """The ranges of all files that were named. Raises UsageError if a file cannot be read or is malformed."""

    paths: tuple[str, ...]
    _changed: set[str] = field(default_factory=set)  # paths of files that have changed since the capture began
    _by_length: dict[int, list[_Range]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.paths:
            file = look_at(path)
            for offset, length in file.ranges:
                if length:
                    self._by_length.setdefault(length, []).append(_Range(file, offset))

    def has_length(self, length: int) -> bool:
        """Whether a range of that length exists, which makes it worth hashing a storage."""
        return length in self._by_length

    def find(self, length: int, digest: int) -> tuple[KnownFile, int] | None:
        """The file and offset of a range with that length and XXH3-128."""
        for candidate in self._by_length.get(length, ()):
            if candidate.file.path in self._changed:
                continue
            if candidate.digest is None:
                candidate.digest = hash_of_range(candidate.file, candidate.offset, length)
            if candidate.digest is None:
                self._changed.add(candidate.file.path)
            elif candidate.digest == digest:
                return candidate.file, candidate.offset
        return None


def expand(named: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The real, absolute paths of the named files: a file itself, the shards of an index, the checkpoint files in a
    directory. Raises UsageError."""
    paths: dict[str, None] = {}
    for name in named:
        given = os.fspath(name)
        if os.path.isdir(given):
            paths.update(dict.fromkeys(_in_directory(given)))
        elif given.endswith(_INDEX_SUFFIX):
            paths.update(dict.fromkeys(_shards(given)))
        else:
            paths[_checked(given)] = None
    return tuple(paths)


def _checked(path: str) -> str:
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--file={path}: {reason}; name a file that exists, or a directory of them") from None
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"--file={path}: is neither a file nor a directory")
    if not os.access(path, os.R_OK):
        raise UsageError(f"--file={path}: permission denied; storages cannot be compared with it")
    return os.path.realpath(path)


def _in_directory(folder: str) -> list[str]:
    names = sorted(os.listdir(folder))
    found = [path for name in names if name.endswith(_INDEX_SUFFIX) for path in _shards(os.path.join(folder, name))]
    found += [_checked(os.path.join(folder, name)) for name in names if name.endswith(_WEIGHTS)]
    if not found:
        raise UsageError(f"--file={folder}: holds no {', '.join(_WEIGHTS)} file; name the files themselves")
    return found


def _shards(index: str) -> list[str]:
    try:
        with open(index, encoding="utf-8") as file:
            places = parse_json(file.read())["weight_map"]
        names = sorted(set(places.values()))
    except OSError as error:
        raise UsageError(f"--file={index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"--file={index}: expected the index of a sharded checkpoint, a JSON object with a "
            "weight_map from tensors to files"
        ) from None
    if not all(isinstance(name, str) and name and os.path.basename(name) == name for name in names):
        raise UsageError(f"--file={index}: its weight_map names files outside its directory")
    return [_checked(os.path.join(os.path.dirname(index), name)) for name in names]


def look_at(path: str, raw: bool = False) -> KnownFile:
    """Inspect a file: its kind and its ranges. `raw`: one range, whatever the content. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            kind, ranges = ("raw", None) if raw else _tensor_ranges(path, status.st_size)
    except OSError as error:
        raise UsageError(f"--file={path}: {error.strerror or error}") from None
    identity = FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)
    return KnownFile(path, status.st_size, identity, kind, ((0, status.st_size),) if ranges is None else ranges)


def format_of(path: str) -> str:
    """The kind of a file, by its first bytes; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = file.read(_SAFETENSORS_START)
            length = os.fstat(file.fileno()).st_size
    except OSError:
        return ""
    if start.startswith(_ZIP_MAGIC):
        return "torch"
    header_bytes = int.from_bytes(start[:8], "little")
    plausible = start[8:] == b"{" and 2 <= header_bytes <= min(_MAX_HEADER_BYTES, length - 8)
    return "safetensors" if plausible else "raw"


def _tensor_ranges(path: str, length: int) -> tuple[str, tuple[tuple[int, int], ...] | None]:
    """The format of a file, and its ranges; None: the file as a whole."""
    kind = format_of(path)  # not by its name: the target of a symbolic link is often named by a hash
    ranges = None
    if kind == "safetensors":
        tensors = _safetensors_tensors(path, length)
        ranges = None if tensors is None else tuple(place for place, _ in tensors)
    elif kind == "torch":
        ranges = _archive(path, length)
    if ranges is None and path.endswith(".safetensors"):
        raise UsageError(f"--file={path}: is not a safetensors file, whatever its name says: its header cannot be read")
    return ("raw", None) if ranges is None else (kind, ranges)


def dtypes_in(path: str) -> dict[tuple[int, int], str]:
    """The dtype name of each range of a safetensors file; empty for any other file."""
    try:
        tensors = _safetensors_tensors(path, os.stat(path).st_size) if format_of(path) == "safetensors" else None
    except OSError:
        return {}
    return dict(tensors or ())


def _safetensors_tensors(path: str, length: int) -> list[tuple[tuple[int, int], str]] | None:
    """Offset, length and dtype of each tensor."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        try:
            header = parse_json(file.read(min(header_bytes, length)))
            found = [
                (tuple(entry["data_offsets"]), str(entry["dtype"]))
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    data = 8 + header_bytes
    for place, _ in found:
        if len(place) != 2 or not all(type(x) is int for x in place) or not 0 <= place[0] <= place[1] <= length - data:
            return None
    return [((data + begin, end - begin), dtype) for (begin, end), dtype in found]


def _archive(path: str, length: int) -> tuple[tuple[int, int], ...] | None:
    """The storages of a torch.save archive, which are stored uncompressed. None if it is another kind of archive."""
    ranges = []
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            for entry in archive.infolist():
                stored = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
                if not stored or "/data/" not in f"/{entry.filename}":
                    continue
                file.seek(entry.header_offset)
                local = file.read(_ZIP_HEADER_BYTES)
                if not local.startswith(_ZIP_MAGIC) or len(local) < _ZIP_HEADER_BYTES:
                    return None
                # The local header has a name and padding of its own; the data follow.
                extra = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
                begin = entry.header_offset + _ZIP_HEADER_BYTES + extra
                if entry.file_size != entry.compress_size or begin + entry.file_size > length:
                    return None
                ranges.append((begin, entry.file_size))
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
    return tuple(ranges) if ranges else None


def hash_of_range(file: KnownFile, offset: int, length: int) -> int | None:
    """The XXH3-128 of a range. None if the file has changed."""
    state = xxhash.xxh3_128()
    try:
        with open(file.path, "rb", buffering=0) as source:
            status = os.fstat(source.fileno())
            if FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns) != file.identity:
                return None
            end, buffer = offset + length, memoryview(bytearray(min(length, _CHUNK_BYTES)))
            while offset < end:
                count = os.preadv(source.fileno(), [buffer[: min(len(buffer), end - offset)]], offset)
                if not count:
                    return None
                state.update(buffer[:count])
                offset += count
    except OSError:
        return None
    return state.intdigest()
