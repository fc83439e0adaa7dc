"""Result files: refused early, written completely or not at all, and shown only with the capture they are of.

The work before a result is written may take minutes, so first it is checked that the result can be written: the file is
opened under a temporary name beside its final one, and renamed once it is complete. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replayfmt.errors import CaptureFailed, OpReplayError, OutputExists, UsageError
from replayfmt.format.output import check_place, same_file
from replayfmt.format.reader import CaptureReader


class OutputFile:
    """A result file that is being written. `partial` is the path to write to; `commit` renames it to its final name."""

    def __init__(self, flag: str, path: Path, partial: Path, force: bool) -> None:
        self._flag, self._path, self._force = flag, path, force
        self.partial = partial
        self.committed = False

    def commit(self) -> None:
        """Rename the finished file to its final name. Raises OutputExists if that has appeared since, without force."""
        refuse_existing(self._flag, self._path, self._force)
        try:
            os.replace(self.partial, self._path)
        except OSError as error:
            raise OpReplayError(f"{self._flag}={self._path}: cannot be written: {error.strerror}") from error
        self.committed = True

    def write(self, text: str) -> None:
        """Write the whole text and commit. Raises OpReplayError if writing fails."""
        self.fill(text.encode())
        self.commit()

    def fill(self, content: bytes) -> None:
        """Write everything, for `commit` to follow. Raises OpReplayError if writing fails."""
        try:
            with open(self.partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OpReplayError(f"{self._flag}={self._path}: cannot be written: {error.strerror}") from error


@contextmanager
def output_file(flag: str, path: str | os.PathLike[str], force: bool) -> Iterator[OutputFile]:
    """Open a result file given by a command-line flag; an uncommitted file is removed on leaving.

    Raises OutputExists for an existing file without `force`, and CaptureFailed if the file cannot be created.
    """
    final = Path(path)
    refuse_existing(flag, path, force)
    # The extension is kept: torch compresses a trace whose name ends in .gz.
    partial = final.with_name(f".{os.getpid()}.{final.name}")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
    except OSError as error:
        raise CaptureFailed(f"{flag}: {path}: cannot be created: {error.strerror}") from error
    output = OutputFile(flag, final, partial, force)
    try:
        yield output
    finally:
        if not output.committed:
            partial.unlink(missing_ok=True)


def refuse_input(
    flag: str, path: str | os.PathLike[str], given: str | os.PathLike[str], what: str = "the capture"
) -> None:
    """Raises UsageError if a result would replace the capture that it describes, or another file that it is made of."""
    if same_file(path, given):
        raise UsageError(f"{flag}={os.fspath(path)}: is {what}; name another file")


def refuse_existing(flag: str, path: str | os.PathLike[str], force: bool) -> None:
    """Raise if a result cannot get this name, as for every other file that a tool writes: OutputExists without `force`,
    CaptureFailed if the file cannot be created."""
    try:
        check_place(path, force)
    except (OutputExists, CaptureFailed) as error:
        raise type(error)(f"{flag}: {error}") from None


# In the traces of replays: the session of the capture that was replayed.
TRACE_SESSION = "opreplay_capture_session"


def require_same_capture(where: str, session: object, reader: CaptureReader) -> None:
    """Raises UsageError if `session`, which a file of measurements names, is not that of the capture. `where` is the
    flag and the file."""
    if session != reader.session.session_id:
        raise UsageError(
            f"{where}: was measured on another capture (session {session!s:.80}); expected one of {reader.path} "
            f"(session {reader.session.session_id}): measure this capture, or name the other one"
        )
