"""The file digest: identifies an external file's content, wherever it is.

XXH3-128 over the digests (canonical, 16 bytes each) of the file's 64 MiB chunks, the last one shorter: so a large file
is read by several threads at once, each through a small buffer. A file that changes while it is read is an error, never
a digest of something that never was.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_128, xxh3_128_hexdigest

from replayfmt.errors import ExternalFileProblem

CHUNK_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20  # what each thread holds; hashing and reading both release the interpreter lock
_MOST_THREADS = 8

Progress = Callable[[int], None]


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
        threads = min(_MOST_THREADS, os.cpu_count() or 1, len(chunks))
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
        """The digest of one chunk."""
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
