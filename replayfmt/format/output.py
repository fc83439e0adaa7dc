"""Files that are written completely or not at all: under the final name plus `.partial` until they are complete.

Also keeps signal handlers out of a write, so that an interrupt does not leave half of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from replayfmt.errors import CaptureFailed, OutputExists, UsageError

_VECTORS = 1000  # below every system's IOV_MAX
_FIRST_FREE = 3  # the descriptors below are standard streams, open or not
BEYOND_THE_PROGRAM = 128  # from here on, so that the program's own descriptors get the numbers that they would have


def unfit(path: str | os.PathLike[str]) -> str | None:
    """Why no file can get this name, whatever is done; None if one can.

    Only a regular file is ever replaced: with /dev/null in its place, a system does not go on for long.
    """
    if not os.path.basename(path) or os.path.isdir(path):
        return "is a directory" if os.fspath(path) else "is empty"
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        return "is a device or a pipe"
    return None


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two names are of one file that is there: a result must not replace what it is made from."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what was begun under a name, if there is anything: it may be a name that no file can have. Whatever keeps
    it there kept it from being finished, too, and that has its own error."""
    with suppress(OSError):
        os.unlink(path)


def check_place(path: str | os.PathLike[str], force: bool) -> None:
    """Raise now what would keep a finished file from getting this name: CaptureFailed, or OutputExists without
    `force`."""
    name = os.fspath(path)
    problem = unfit(name)
    if problem is not None:
        raise CaptureFailed(f"{name}: {problem}; name a file to write to")
    if os.path.lexists(name) and not force:
        raise OutputExists(f"{name}: exists already; remove it, write elsewhere, or use --force (force=True)")
    check_folder(name)


def check_folder(name: str) -> None:
    """Raise CaptureFailed where nothing can be created beside this name, because of the folder it is in."""
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise CaptureFailed(f"{name}: there is no directory {folder}; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = "the file system is read-only" if _is_read_only(folder) else "permission denied"
        raise CaptureFailed(f"{name}: files cannot be created in {folder}: {reason}")


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those that it is in, unless they are there. Raises CaptureFailed."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        name = os.fspath(path) or "a folder without a name"
        raise CaptureFailed(f"{name}: cannot be made: {error.strerror}") from None


RANK_FILE = "rank{rank}.opreplay"  # in the folder of all ranks


def is_folder(out: str) -> bool:
    """Whether what is written goes to a folder, with a file of each rank."""
    return out.endswith(os.sep) or os.path.isdir(out)


@contextmanager
def new_file(path: str | os.PathLike[str], force: bool) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when the block ends well and is removed otherwise.

    Raises OutputExists without `force`, CaptureFailed if it cannot be written.
    """
    final = Path(path)
    check_place(final, force)
    partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
        os.replace(partial, final)
    except OSError as error:
        raise CaptureFailed(f"{final}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # it may never have been there
            partial.unlink()


@contextmanager
def new_folder(path: str | os.PathLike[str], force: bool, what: str, is_one: Callable[[Path], bool]) -> Iterator[Path]:
    """Where to write a folder; it gets its name when everything inside has succeeded, and is removed otherwise.

    With `force` it replaces one that `is_one` knows: `what`, for people. Raises OutputExists, UsageError for a place
    that must not be replaced, and CaptureFailed if something cannot be written.
    """
    final = Path(path)
    if not final.name:
        raise UsageError(f"{os.fspath(path) or 'nothing'}: expected the name of a folder")
    partial = final.with_name(f"{final.name}.partial")
    try:
        _check_new_folder(final, force, what, is_one)
        check_folder(str(final))
        partial.mkdir()
    except FileExistsError:
        raise OutputExists(
            f"{partial}: exists already, from a run that is still in progress or was interrupted; remove it"
        ) from None
    except OSError as error:
        raise CaptureFailed(f"{partial}: cannot be created: {error.strerror}") from None
    try:
        yield partial
        _check_new_folder(final, force, what, is_one)
        if final.is_dir():
            shutil.rmtree(final)
        os.rename(partial, final)
    except OSError as error:
        raise CaptureFailed(f"{error.filename or final}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_new_folder(folder: Path, force: bool, what: str, is_one: Callable[[Path], bool]) -> None:
    """Raise if a folder cannot get this name."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder; name a new one")
    if not any(folder.iterdir()):
        return
    if not force:
        raise OutputExists(f"{folder}: exists already; remove it, write elsewhere, or use --force")
    if not is_one(folder):
        raise UsageError(f"{folder}: is not {what}, and is not replaced; name another folder")


def _is_read_only(folder: str) -> bool:
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


Identity = tuple[int, int]  # device and inode


def identity(file: str | int) -> Identity | None:
    """Which file has a name (a link itself, not what it leads to) or is open under a descriptor; None: none."""
    try:
        status = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove(name: str, ours: Identity | None) -> None:
    """Remove a file, where it still has that name."""
    if ours is not None and identity(name) == ours:
        with suppress(FileNotFoundError):
            os.unlink(name)


def moved_up(fd: int, first: int = _FIRST_FREE) -> int:
    """The same open file under a number from `first` on: one that no standard stream has, or that programs do not get.
    Raises OSError, with the file closed."""
    if fd >= first:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first)
    finally:
        os.close(fd)


class Output:
    """An append-only file. Not safe for use from several threads at once."""

    def __init__(self, path: str | os.PathLike[str], force: bool, *, doing: str = "") -> None:
        """Create `path`.partial; or, where the capture is made from another file, `path`.`doing`.partial: what is
        recovered may be `path`.partial, and what an earlier attempt left is no loss. Raises OutputExists, or
        CaptureFailed if it cannot be created."""
        self.path = os.fspath(path)
        self.partial = self.path + (f".{doing}.partial" if doing else ".partial")
        self._advice = (
            f"{doing} ends here, and no file is left; what it reads is unchanged"
            if doing
            else f"the capture ends here, and opreplay-check {self.partial} --recover OUT keeps what is there"
        )
        self.position = 0
        self._force = force
        self._failure: CaptureFailed | None = None
        self._fd = -1
        self._finished = False
        self._identity: Identity | None = None
        self._begun = False
        self._doing = doing
        self._process = os.getpid()
        check_place(self.path, force)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            if (force or doing) and os.path.lexists(self.partial):
                # Not truncated in place: another process may still be writing it, and would write into ours.
                os.unlink(self.partial)
            self._fd = moved_up(os.open(self.partial, flags, 0o666))
            self._identity = identity(self._fd)
        except FileExistsError:
            raise OutputExists(
                f"{self.partial}: exists already, from a capture that is still being written or was "
                f"never closed; recover it with opreplay-check {self.partial} --recover OUT, remove it, "
                "or use --force (force=True)"
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CaptureFailed(f"{self.partial}: cannot be written: {reason}") from None

    def write(self, parts: Sequence[bytes | bytearray | memoryview], at: int | None = None) -> None:
        """Append all of `parts`, in order, without copying them; or put them where `at` says, over what was written.
        Raises CaptureFailed."""
        self._check_intact()
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        try:
            first = 0
            while first < len(views):
                vectors = views[first : first + _VECTORS]
                if at is None:
                    done = os.writev(self._fd, vectors)
                    self.position += done
                else:
                    done = os.pwritev(self._fd, vectors, at)
                    at += done
                # A write may return short: at 2 GiB, when a signal comes, or when the disk fills up.
                while first < len(views) and done >= len(views[first]):
                    done -= len(views[first])
                    first += 1
                if done:
                    views[first] = views[first][done:]
        except OSError as error:
            raise self._failed("written", error) from None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, error: type[BaseException] | None, *_more: object) -> None:
        """Finish the file, or after an error discard it."""
        if error is None:
            self.finish()
        else:
            self.discard()

    def check(self) -> None:
        """Raise what ended the file, if anything did."""
        if self._failure is not None:
            raise CaptureFailed(*self._failure.args)
        if self._fd < 0:
            raise CaptureFailed(f"{self.path}: the capture was closed already")

    def _check_intact(self) -> None:
        """Raise unless the file is still what was written to it, and nothing else."""
        self.check()
        if os.getpid() != self._process:
            raise CaptureFailed(f"{self.partial}: a forked child tried to write to its parent's capture")
        if identity(self._fd) != self._identity:
            self._fd = -1  # whoever has it now: it is not ours to close
            raise self.fail("its descriptor was closed by the program (os.close, os.closerange, or a library)")
        length = os.fstat(self._fd).st_size
        if length != self.position:
            raise self.fail(
                f"something else wrote to it or cut it: it has {length:,} bytes where {self.position:,} were written"
            )

    def _failed(self, doing: str, error: OSError) -> CaptureFailed:
        hint = {
            errno.ENOSPC: "; the disk is full",
            errno.EDQUOT: "; the disk quota is used up",
            errno.EFBIG: "; the file is as long as the system lets it be",
        }.get(error.errno or 0, "")
        return self.fail(f"could not be {doing} at {self.position:#x}: {error.strerror}{hint}")

    def fail(self, reason: str) -> CaptureFailed:
        """End the file because of `reason`; the error that this and every later call is to raise."""
        if self._failure is None:
            kept = self._begun or self._doing
            advice = self._advice if kept else "no record was written by then, and no file is left"
            self._failure = CaptureFailed(f"{self.partial}: {reason}; {advice}")
            self.release()
            if self._doing or not self._begun:
                remove(self.partial, self._identity)
        return CaptureFailed(*self._failure.args)

    def begun(self) -> None:
        """Records are written: from now on what is in the file is worth keeping, if it is not made from another one."""
        self._begun = True

    def finish(self) -> None:
        """Give the complete file its final name. Raises CaptureFailed.

        Nothing is synced to the disk: as with other programs' files, a power failure soon afterwards may take the end
        of it, and the checks in it tell.
        """
        self._check_intact()
        self.release()
        if identity(self.partial) != self._identity:
            self._failure = CaptureFailed(
                f"{self.partial}: was removed or replaced while it was being written, by another capture to the same "
                "path or by hand, and this capture is lost with it; use a separate path for each"
            )
            raise CaptureFailed(*self._failure.args)
        if os.path.lexists(self.path) and not self._force:
            raise self._complete_but("that name was taken meanwhile")
        try:
            os.replace(self.partial, self.path)
        except OSError as error:
            raise self._complete_but(str(error.strerror)) from None
        self._finished = True

    def _complete_but(self, reason: str) -> CaptureFailed:
        self._failure = CaptureFailed(
            f"{self.partial}: is complete, but could not be renamed to {self.path}: {reason}; rename it yourself"
        )
        return CaptureFailed(*self._failure.args)

    def discard(self) -> None:
        """Close the file and remove it, where it did not get its final name."""
        self.release()
        if not self._finished:
            remove(self.partial, self._identity)

    def withdraw(self) -> None:
        """Remove the complete file, where its name is still its own."""
        if self._finished:
            remove(self.path, self._identity)

    def release(self) -> None:
        """Close the descriptor and leave the file as it is."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if identity(fd) != self._identity:
                return  # it is someone else's by now
            try:
                os.close(fd)
            except OSError as error:
                if self._failure is None:
                    raise self._failed("closed", error) from None


_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD")
    if hasattr(signal, name)
)
# The same functions in C. Those of `signal` look every handler up among the members of an enumeration, which takes
# ten times as long as all else here.
_handlers: Any = sys.modules.get("_signal", signal)


_put_off = False  # whether the main thread is inside one


def in_main_thread() -> bool:
    """Asked of `threading.current_thread`, a thread that the module does not know would be listed from then on."""
    return threading.get_ident() == threading.main_thread().ident


class Uninterrupted:
    """A context manager; see the module. Only the main thread ever runs handlers, so elsewhere it does nothing, nor
    does it inside another one."""

    def __init__(self) -> None:
        self._outermost = False
        self._saved: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: dict[int, FrameType | None] = {}  # each once, as Python itself keeps them

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived[number] = frame

    def __enter__(self) -> None:
        global _put_off
        if _put_off or not in_main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = _handlers.getsignal(number)
                if callable(handler):
                    self._saved[number] = handler
                    _handlers.signal(number, self._note)
        except BaseException:  # a handler that was not put off yet raised
            self._restore(list(self._saved))
            raise
        _put_off = self._outermost = True

    def _restore(self, numbers: list[int]) -> None:
        """Put the handlers back and call them for what arrived: all of them, also where one raises meanwhile."""
        global _put_off
        _put_off = False
        try:
            while numbers:
                _handlers.signal(numbers[-1], self._saved[numbers[-1]])
                numbers.pop()
            while self._arrived:
                number, frame = self._arrived.popitem()
                self._saved[number](number, frame)
        finally:
            if numbers or self._arrived:
                self._restore(numbers)

    def __exit__(self, *_exception: object) -> None:
        if self._outermost:
            self._restore(list(self._saved))
