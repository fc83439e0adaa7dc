"""Every error this project raises on purpose, with the status name and exit code the tools report.

A message says what is wrong, where (path, frame, offset, ordinal), what was expected and found, and what to do next.
The tools print it as one line, `STATUS: message`, and exit with `exit_code`. Imports nothing of the project.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says, for one of ours."""
    return str(error).strip().partition("\n")[0]


class SubstitutionFindings(Protocol):
    """What an error about replacements carries: a report that can be shown."""

    @property
    def findings(self) -> tuple[str, ...]: ...

    def as_text(self) -> list[str]: ...

    def as_rows(self) -> list[dict[str, Any]]: ...


class OpReplayError(Exception):
    """Base class. `status` is a canonical status name, `exit_code` what a tool exits with, `findings` are sentences
    that belong to the message."""

    status = "FAILED_PRECONDITION"
    exit_code = 1

    def __init__(self, message: str = "", findings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class UsageError(OpReplayError):
    """The caller's arguments are wrong."""

    status = "INVALID_ARGUMENT"
    exit_code = 2


class CaptureNotFound(OpReplayError):
    """The capture is missing, is a directory or cannot be read."""

    status = "NOT_FOUND"
    exit_code = 3


class InvalidCapture(OpReplayError):
    """The file is not a valid capture: damaged, truncated, hostile, or not a capture at all."""

    status = "DATA_LOSS"
    exit_code = 3


class InvalidRecording(InvalidCapture):
    """A file of a probe's recording is not what it has to be: damaged, truncated, hostile, or of another kind."""


class UnsupportedVersion(InvalidCapture):
    """The file needs a newer reader."""

    status = "UNIMPLEMENTED"


class CaptureFailed(OpReplayError):
    """The capture could not be started, written or closed. The program under capture continues."""


class NothingCaptured(CaptureFailed):
    """A capture was closed without an op in it. `file` says what became of the file."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(f"{message}; {file}")
        self.file = file


class LibraryMissing(OpReplayError):
    """What was asked for needs a library that is not installed: an extra of this package."""


def optional_library(name: str, what: str, advice: str) -> Any:
    """The library, imported. Raises LibraryMissing, that `what` needs it, if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        if error.name != name:
            raise
        raise LibraryMissing(f"{what} needs {name}, which is not installed: {advice}") from None


class OutputExists(OpReplayError):
    """A file would be overwritten without --force."""

    status = "FAILED_PRECONDITION"


class ExternalFileProblem(OpReplayError):
    """A file that a capture refers to is missing, cannot be read, or is not the one that was captured."""


class ContentNotCaptured(OpReplayError):
    """A tensor's content was requested from a capture that does not hold it: it was computed, or left out."""


class ReplayRefused(OpReplayError):
    """The plan found work it cannot reproduce; nothing was run.

    `findings` lists every one of them, each a full sentence.
    """


class ReplayFailed(OpReplayError):
    """An op failed while it was being replayed."""


class ReplayMismatch(OpReplayError):
    """The replay ran, and a result differs from the captured one. `findings` say what may explain it."""

    status = "DATA_LOSS"


class GuardViolated(ReplayFailed):
    """Kernels used memory beside their arguments. `findings` are full sentences, one for each kernel, argument and
    side."""

    status = "OUT_OF_RANGE"


class SubstitutionFailed(ReplayFailed):
    """A replacement raised an exception. `findings` are the lines of its traceback, from the replacement's file on."""

    status = "ABORTED"


class SubstitutionRejected(ReplayMismatch):
    """A replacement does not do what the original kernel does; it was not used.

    `report` has the findings for every substituted signature, `findings` one full sentence for each fault.
    """

    status = "ABORTED"

    def __init__(self, message: str, report: SubstitutionFindings) -> None:
        super().__init__(message, report.findings)
        self.report = report
