"""Files that a capture refers to by path: the digest that identifies their content, where they are now, and whether
they are still what the capture describes.

A remap is a CAPTURED=REPLAY pair of path prefixes, as the user gave it. A file is opened once, compared with its
description, and mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_128, xxh3_128_hexdigest

from replayfmt.errors import ExternalFileProblem, UsageError

from .model import ExternalFile, FileIdentity
from .source import Closing, fill
from .validation import texts_of

CHUNK_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20  # what each thread holds; hashing and reading both release the interpreter lock
_MOST_THREADS = 8

Progress = Callable[[int], None]


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digest_file(path_or_fd: str | os.PathLike[str] | int, progress: Progress | None = None) -> str:
    """The file digest as 32 hexadecimal digits, of a path or of a descriptor that stays the caller's.

    `progress` is called with numbers of bytes, one call at a time, from any thread. Raises ExternalFileProblem if
    the file is not a regular file, cannot be read, or changes meanwhile.
    """
    if isinstance(path_or_fd, int):
        return _Digest(path_or_fd, f"descriptor {path_or_fd}", progress).run()
    path = os.fspath(path_or_fd)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ExternalFileProblem(f"{path!r} cannot be read: {_why(error)}") from None
    try:
        return _Digest(fd, path, progress).run()
    finally:
        os.close(fd)


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


class _Digest:
    def __init__(self, fd: int, name: str, progress: Progress | None) -> None:
        self._fd = fd
        self._name = name
        self._progress = progress
        self._reporting = threading.Lock()
        self._stopped = False

    def run(self) -> str:
        before = os.fstat(self._fd)
        if not stat.S_ISREG(before.st_mode):
            raise ExternalFileProblem(f"{self._name} is not a regular file; nothing else has a file digest")
        chunks = range(0, before.st_size, CHUNK_BYTES)
        lengths = [min(CHUNK_BYTES, before.st_size - start) for start in chunks]
        threads = min(_MOST_THREADS, processors(), len(chunks))
        if threads < 2:
            digests = [self._chunk(start, length) for start, length in zip(chunks, lengths, strict=True)]
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="file-digest") as pool:
                try:
                    digests = list(pool.map(self._chunk, chunks, lengths))
                finally:
                    self._stopped = True  # after a failure or an interrupt, the other chunks are not read to their end
        after = os.fstat(self._fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ExternalFileProblem(f"{self._name} changed while it was read; nothing that changes has a file digest")
        return xxh3_128_hexdigest(b"".join(digests))

    def _chunk(self, start: int, length: int) -> bytes:
        hashing = xxh3_128()
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, length)))
        done = 0
        while done < length and not self._stopped:
            try:
                count = os.preadv(self._fd, [buffer[: length - done]], start + done)
            except OSError as error:
                raise ExternalFileProblem(f"{self._name} cannot be read at {start + done:#x}: {_why(error)}") from None
            if not count:
                raise ExternalFileProblem(
                    f"{self._name} became shorter while it was read: it ends at {start + done:#x}"
                )
            hashing.update(buffer[:count])
            done += count
            if self._progress is not None:
                with self._reporting:
                    self._progress(count)
        return hashing.digest()


FLAG = "--replay-file-remap"


def _components(path: str) -> tuple[str, ...]:
    """A path's parts, without empty ones and `.`; a leading slash is a part of its own, `..` stays as it is."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    return ("/", *parts) if path.startswith("/") else parts


@dataclass(frozen=True)
class _Remap:
    text: str  # as given
    captured: tuple[str, ...]
    replay: str


class FileRemaps:
    """Path prefixes to replace; an empty one changes nothing."""

    def __init__(self, remaps: Sequence[_Remap] = ()) -> None:
        self._remaps = tuple(sorted(remaps, key=lambda remap: len(remap.captured), reverse=True))

    @classmethod
    def parse(cls, values: Sequence[str]) -> FileRemaps:
        """Remaps from CAPTURED=REPLAY texts, each split at its first `=`. Raises UsageError if one has no `=` or no
        captured prefix, or if two have the same one. An empty REPLAY takes the prefix away."""
        remaps: list[_Remap] = []
        for value in texts_of("file_remaps", values):
            captured, equals, replay = value.partition("=")
            if not equals:
                raise UsageError(f"{FLAG}={value}: expected CAPTURED=REPLAY, found no `=`")
            if not captured:
                raise UsageError(
                    f"{FLAG}={value}: the captured prefix before `=` is empty; give the path, or the "
                    "leading directories of it, that the capture names"
                )
            if "\0" in value:
                raise UsageError(f"{FLAG}={value!r}: a path cannot hold a NUL")
            remap = _Remap(value, _components(captured), replay)
            for other in remaps:
                if other.captured == remap.captured:
                    raise UsageError(f"{FLAG}={value}: {FLAG}={other.text} has the same captured prefix; give it once")
            remaps.append(remap)
        return cls(remaps)

    def __bool__(self) -> bool:
        return bool(self._remaps)

    def _find(self, path: str) -> _Remap | None:
        parts = _components(path)
        for remap in self._remaps:
            if not remap.captured and path.startswith("/"):
                continue  # `.` is where relative paths begin, and no other
            if parts[: len(remap.captured)] == remap.captured and ".." not in parts[len(remap.captured) :]:
                return remap
        return None

    def apply(self, path: str) -> str:
        """Where a captured path is now: the path as it is where no prefix matches. A path that an empty REPLAY leaves
        nothing of raises UsageError."""
        remap = self._find(path)
        if remap is None:
            return path
        rest = "/".join(_components(path)[len(remap.captured) :])
        if not remap.replay:
            replaced = rest
        elif not rest:
            replaced = remap.replay
        else:
            replaced = remap.replay.rstrip("/") + "/" + rest
        if not replaced:
            raise UsageError(f"{FLAG}={remap.text} leaves nothing of the captured path {path}")
        return replaced

    def check_used(self, paths: Iterable[str]) -> None:
        """Raise UsageError where a remap is the longest match of none of the captured `paths`: it would do nothing."""
        paths = list(paths)
        used = {remap.text for path in paths if (remap := self._find(path)) is not None}
        for remap in self._remaps:
            if remap.text not in used:
                some = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
                raise UsageError(
                    f"{FLAG}={remap.text} matches no external file of the capture, which names "
                    f"{some or 'none'}; prefixes match whole path components, the longest wins"
                )


_REMAP = "--replay-file-remap=CAPTURED=REPLAY says where it is now"

# Digests of this process: a file's status (device, inode, length, modification and change time) names its content.
_digests: dict[tuple[int, int, int, int, int], str] = {}
# The clock of a file system ticks: what changes again within a tick keeps its times. No tick is as long as this.
_TICK_NS = 2_000_000_000


def _status(fd: int) -> tuple[int, int, int, int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _why_not(path: str, error: OSError | ValueError) -> str:
    """Why a path could not be opened, in a sentence."""
    if isinstance(error, ValueError):
        return f"external file {path!r} cannot be opened: {error}"
    reasons = {
        errno.ENOENT: "does not exist",
        errno.ENOTDIR: "does not exist: a part of the path is not a directory",
        errno.EACCES: "cannot be read: permission denied",
        errno.EPERM: "cannot be read: permission denied",
        errno.ELOOP: "cannot be opened: its symbolic links lead in a circle",
        errno.EISDIR: "is a directory; expected a file",
        errno.ENXIO: "is not a regular file",
    }
    return f"external file {path} {reasons.get(error.errno or 0, f'cannot be opened: {error.strerror}')}"


def _expect_file(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise ExternalFileProblem(f"external file {path} is {kind}; expected a file")


class OpenedFile(Closing):
    """An external file, open for reading; close it, or use it in a `with` statement. Maps outlive it.

    `bytes` and `identity` are those of the file that was opened.
    """

    def __init__(self, path: str) -> None:
        """Open `path` as it is given, relative to the working directory, following symbolic links. Raises
        ExternalFileProblem if there is no regular file that can be read."""
        self.path = path
        self._fd = -1
        try:
            # Looked at before it is opened: the path may come from a capture, and opening a device can do things.
            _expect_file(path, os.stat(path).st_mode)
            # Without O_NONBLOCK, opening what became a named pipe meanwhile would wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._fd)
            _expect_file(path, found.st_mode)
        except (OSError, ValueError) as error:
            self.close()
            raise ExternalFileProblem(_why_not(path, error)) from None
        except ExternalFileProblem:
            self.close()
            raise
        self.bytes = found.st_size
        self.identity = FileIdentity(found.st_dev, found.st_ino, found.st_mtime_ns)
        self._opened = _status(self._fd)

    def digest(self, progress: Progress | None = None) -> str:
        """The file digest, read once in this process for as long as the file does not change; again each time where
        it was changed so lately that its times would not show it. Raises ExternalFileProblem if it cannot be read
        or changes meanwhile."""
        known = _digests.get(self._opened)
        if known is None:
            try:
                known = digest_file(self._fd, progress)
            except ExternalFileProblem as error:
                raise ExternalFileProblem(f"external file {self.path}: {error}") from None
            if _status(self._fd) != self._opened:
                raise ExternalFileProblem(f"external file {self.path} changed while it was read")
            if time.time_ns() - self._opened[4] > _TICK_NS:
                _digests[self._opened] = known
        return known

    def problem(self, file: ExternalFile, remapped: bool, progress: Progress | None = None) -> str | None:
        """What differs from the captured `file`, in a sentence with what to do next; None if it is that file.

        A digest decides where the capture has one, else the identity. `remapped` says that the user chose the path.
        """
        name = f"external file {self.path}" + (f" (captured as {file.path})" if remapped else "")
        if self.bytes != file.bytes:
            return (
                f"{name} has {self.bytes} bytes, the captured one had {file.bytes}: it is another file, or was changed"
            )
        if file.digest is not None:
            try:
                found = self.digest(progress)
            except ExternalFileProblem as error:
                return str(error)
            if found != file.digest:
                return f"{name} has other content than the captured one: its digest is {found}, expected {file.digest}"
            return None
        if file.identity is None:
            return (
                f"{name} cannot be distinguished from another file of its length: the capture has neither its "
                f"identity nor "
                "its digest; recapture with digests (opreplay-capture --file-validation=digest)"
            )
        if self.identity != file.identity:
            return (
                f"{name} is not known to be the captured one: {_difference(self.identity, file.identity)}; after a "
                "copy, recapture with digests (opreplay-capture --file-validation=digest), or add them where the "
                "captured file still is (opreplay-check --add-digests)"
            )
        return None

    def changed(self) -> str | None:
        """Whether the path has been given to another file, or this one was changed, since it was opened: a sentence, or
        None. Call it last thing before content is used."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            return f"{_why_not(self.path, error)}; it was there when it was validated"
        if (now.st_dev, now.st_ino) != self._opened[:2]:
            return f"external file {self.path} was replaced by another one after it was validated"
        if _status(self._fd) != self._opened:  # the time of change, too: the other one can be set back
            return f"external file {self.path} was changed after it was validated"
        return None

    def map(self, offset: int, length: int, copy_on_write: bool = False) -> memoryview:
        """`length` bytes from `offset` on, mapped and not read: only pages that are touched are. Read-only, or with
        `copy_on_write` writable in memory alone; the file is never written.

        Valid as long as the result is alive. Touching a page that the file no longer has, because someone truncated it,
        ends the process: see `changed`. Raises ExternalFileProblem if the file does not have these bytes.
        """
        if offset < 0 or length < 0 or offset + length > os.fstat(self._fd).st_size:
            raise ExternalFileProblem(f"external file {self.path} has no {length} bytes at {offset}")
        if not length:
            return memoryview(bytearray())
        before = offset % mmap.ALLOCATIONGRANULARITY
        access = mmap.ACCESS_COPY if copy_on_write else mmap.ACCESS_READ
        try:
            mapped = mmap.mmap(self._fd, before + length, access=access, offset=offset - before)
        except (OSError, ValueError) as error:
            raise ExternalFileProblem(f"external file {self.path} cannot be mapped: {error}") from None
        return memoryview(mapped)[before:]

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on. Raises ExternalFileProblem if the file has fewer."""
        view = memoryview(buffer).cast("B")
        try:
            done = fill(self._fd, offset, view)
        except OSError as error:
            raise ExternalFileProblem(f"external file {self.path} cannot be read: {error.strerror}") from None
        if done < len(view):
            raise ExternalFileProblem(
                f"external file {self.path} ends at {offset + done}; expected {len(view)} bytes at {offset}"
            )

    def close(self) -> None:
        """Close the descriptor. Closing twice does nothing; maps stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _difference(found: FileIdentity, captured: FileIdentity) -> str:
    names = {"device": "device", "inode": "inode", "mtime_ns": "time of last modification"}
    other = [text for name, text in names.items() if getattr(found, name) != getattr(captured, name)]
    return f"its {' and '.join(other)} {'differs' if len(other) == 1 else 'differ'}"


def missing(error: ExternalFileProblem, file: ExternalFile, remapped: bool) -> str:
    """Why a captured file could not be opened, and what to do next: a sentence."""
    captured = f" (captured as {file.path})" if remapped else ""
    return f"{error}{captured}; {_REMAP}"


def validate(file: ExternalFile, path: str, remapped: bool, progress: Progress | None = None) -> str | None:
    """What is wrong with the file at `path`, which should be the captured `file`, and what to do next: a sentence, or
    None. `remapped` says that the user chose the path; `progress` is called with numbers of bytes digested."""
    try:
        opened = OpenedFile(path)
    except ExternalFileProblem as error:
        return missing(error, file, remapped)
    with opened:
        return opened.problem(file, remapped, progress)
