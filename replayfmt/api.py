"""The library's front door: `open` a capture and look at it, replay one op of it. Imports torch only to replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Kernel, Record, Session, Summary
from replayfmt.format.reader import CaptureReader, open_capture

if TYPE_CHECKING:
    from replayfmt.initializers import Initializer


class Op:
    """One op of a capture. `record` holds its decoded arguments and results; describing it allocates no tensor."""

    def __init__(self, reader: CaptureReader, record: Record) -> None:
        self._reader = reader
        self.record = record

    @property
    def ordinal(self) -> int:
        return self.record.ordinal

    @property
    def kernel(self) -> Kernel:
        return self._reader.kernels[self.record.signature.kernel]

    @property
    def scope(self) -> str:
        """Path of the scope it ran in, "" outside any."""
        return self._reader.scope_path(self.record.scope)

    def replay(self, device: str | None = None, *, file_remaps: Sequence[str] = (),
               initializers: Sequence[Initializer] = ()) -> Any:
        """Run this op alone on the inputs it had, and return its results as the kernel gives them.

        `file_remaps` say where external files are now (CAPTURED=REPLAY), `initializers` fill what was not captured.

        Raises ReplayRefused where its inputs cannot be rebuilt from the capture.
        """
        from replayfmt.replay.single import replay_op

        return replay_op(self._reader, self.ordinal, device, file_remaps, initializers)

    def __repr__(self) -> str:
        return f"<op {self.ordinal} {self.kernel.qualified_name}>"


class Ops(Mapping[int, Op]):
    """The ops of a capture by ordinal. Ordinals count every record, so not every number below the last is an op."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def __getitem__(self, ordinal: int) -> Op:
        if not 0 <= ordinal < self._reader.record_count:
            raise KeyError(ordinal)
        record = self._reader.record(ordinal)
        if record.kind is not RecordKind.op:
            raise KeyError(ordinal)
        return Op(self._reader, record)

    def __iter__(self) -> Iterator[int]:
        return (record.ordinal for record in self._reader.records() if record.kind is RecordKind.op)

    def __len__(self) -> int:
        return self._reader.summary.records.get(RecordKind.op, 0)


class Capture:
    """An open capture. Use it as a context manager, or `close()` it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Raises CaptureNotFound, InvalidCapture or UnsupportedVersion."""
        self.reader = open_capture(fspath(path))

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def complete(self) -> bool:
        """False where the capture was never closed."""
        return self.reader.complete

    @property
    def session(self) -> Session:
        return self.reader.session

    @property
    def summary(self) -> Summary:
        return self.reader.summary

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that was called; the kernel with id n is element n - 1."""
        return tuple(self.reader.kernels[1:])

    @property
    def scopes(self) -> tuple[str, ...]:
        """Path of every scope, in order of first entry."""
        return tuple(self.reader.scope_path(scope) for scope in range(1, len(self.reader.scopes)))

    @cached_property
    def ops(self) -> Ops:
        return Ops(self.reader)

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open(path: str | PathLike[str]) -> Capture:
    """Open a capture for looking at it. See `Capture`."""
    if not isinstance(path, str | PathLike):
        raise UsageError(f"open takes a path, not {type(path).__name__}")
    return Capture(path)
