"""The library's entry point: `open` a capture, inspect it, replay one op of it.

Imports torch only for an op's values and to replay; pandas only where a table is requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import index
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import CaptureInfo, Kernel, Record, Summary
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.source import Closing
from replayfmt.format.validation import text_of

if TYPE_CHECKING:
    import pandas

    from replayfmt.export.tables import TableName
    from replayfmt.initializers import Initializer
    from replayfmt.replay.preparation import PlanOptions
    from replayfmt.report.findings import Finding


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

    @property
    def duration_ns(self) -> int | None:
        """What the call took on the host while it was captured, in nanoseconds, the recorder's own work included. None:
        not measured."""
        return self.record.duration_ns

    @property
    def device_duration_ns(self) -> int | None:
        """The device time of its work, in nanoseconds, if a trace had it. None: not measured."""
        return self.record.device_duration_ns

    def inputs(self, *, replay: bool = False, **options: Unpack[PlanOptions]) -> dict[str, Any]:
        """The op's arguments by name, as PyTorch has them, with the content they had right before it.

        Without `replay` nothing runs: tensors are on the CPU, in memory of their own, and hold what the capture holds:
        content that entered from outside and that no op has written since. With `replay` the capture is replayed up to
        the op, and verified where it holds something to compare with; tensors are where the replay has them, and what
        was left out of the capture is synthesized as in every replay. `options` are those of Plan. Tensors that share
        memory share it here, too.

        Raises ContentNotCaptured, which says why, if the capture does not hold a tensor's content.
        """
        from replayfmt.replay.convenience import arguments_by_name, op_values

        return arguments_by_name(
            self.record, op_values(self._reader, self.record, results=False, replay=replay, options=options)
        )

    def results(self, *, replay: bool = False, **options: Unpack[PlanOptions]) -> list[Any]:
        """What the op returned, in the order of its schema, right after it; see `inputs`.

        A capture seldom holds results: of what ops computed it has digests at most. It holds numbers that they gave to
        the program, and results that are views on captured memory. The others need `replay`.

        Raises ContentNotCaptured, which says why, if the capture does not hold a tensor's content.
        """
        from replayfmt.replay.convenience import op_values

        return op_values(self._reader, self.record, results=True, replay=replay, options=options)

    def replay(
        self,
        device: str | None = None,
        *,
        file_remaps: Sequence[str] = (),
        initializers: Sequence[Initializer] = (),
        allow_code: bool = False,
    ) -> Any:
        """Run this op alone on its captured inputs, and return its results as the kernel returns them.

        `file_remaps` say where external files are now (CAPTURED=REPLAY), `initializers` fill what was not captured,
        `allow_code` lets code that is in the capture run (see Plan).

        Raises ReplayRefused if its inputs cannot be rebuilt from the capture.
        """
        from replayfmt.replay.convenience import replay_op

        return replay_op(
            self._reader,
            self.ordinal,
            devices=[] if device is None else [text_of("device", device)],
            file_remaps=file_remaps,
            initializers=initializers,
            allow_code=allow_code,
        )

    def __repr__(self) -> str:
        return f"<op {self.ordinal} {self.kernel.qualified_name}>"


class Ops(Sequence[Op]):
    """The ops of a capture, in order: `ops[0]` is the first, `ops[-5:]` are the last five. `by_ordinal` finds them by
    the ordinals that the tools show, which count every record."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self.by_ordinal = OpsByOrdinal(reader)

    @overload
    def __getitem__(self, place: int) -> Op: ...

    @overload
    def __getitem__(self, place: slice) -> list[Op]: ...

    def __getitem__(self, place: int | slice) -> Op | list[Op]:
        """Raises IndexError for a place behind the last op."""
        if isinstance(place, slice):
            return [self.by_ordinal[each] for each in self._ordinals[place].tolist()]
        return self.by_ordinal[int(self._ordinals[index(place)])]

    def __iter__(self) -> Iterator[Op]:
        return (Op(self._reader, record) for record in self._reader.records() if record.kind is RecordKind.op)

    def __len__(self) -> int:
        return len(self.by_ordinal)

    @cached_property
    def _ordinals(self) -> np.ndarray:
        return self._reader.op_ordinals()


class OpsByOrdinal(Mapping[int, Op]):
    """The ops of a capture by ordinal. Ordinals count every record, so not every number below the last is an op."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def __getitem__(self, ordinal: int) -> Op:
        """Raises KeyError if no op has the ordinal."""
        if not hasattr(type(ordinal), "__index__") or not 0 <= index(ordinal) < self._reader.record_count:
            raise KeyError(ordinal)
        record = self._reader.record(index(ordinal))
        if record.kind is not RecordKind.op:
            raise KeyError(ordinal)
        return Op(self._reader, record)

    def __iter__(self) -> Iterator[int]:
        return (record.ordinal for record in self._reader.records() if record.kind is RecordKind.op)

    def __len__(self) -> int:
        return self._reader.summary.records.get(RecordKind.op, 0)


class Capture(Closing):
    """An open capture. Use it as a context manager, or `close()` it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Raises CaptureNotFound, InvalidCapture or UnsupportedVersion."""
        self.reader = open_capture(path)

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def complete(self) -> bool:
        """False if the capture was never closed."""
        return self.reader.complete

    @property
    def session(self) -> CaptureInfo:
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

    def to_pandas(self, table: TableName = "ops") -> pandas.DataFrame:
        """A table as a DataFrame; docs/tables.md says what each column holds. Unknown numbers are NA, never 0.

        `ops` has a row for each op, by ordinal; `signatures` for each distinct signature of ops (docs/signatures.md),
        with numbers of calls and sums of times; `kernels` likewise for each kernel, by its id; `device-kernels` for
        each that an imported profiler trace has.

        Raises LibraryMissing if pandas is not installed.
        """
        from replayfmt.export.tables import data_frame

        return data_frame(self.reader, table)

    def findings(self) -> list[Finding]:
        """What stands out, as opreplay-dump --findings prints it: at most five, each with `text`, `command` and
        `figures` (seconds, bytes, shares). Raises InvalidCapture for a damaged frame."""
        from replayfmt.report.findings import capture_findings

        return capture_findings(self.reader)

    def report(self, path: str | PathLike[str], *, force: bool = False) -> None:
        """Write the page of opreplay-report about this capture, without measurements. Raises OutputExists without
        `force`, LibraryMissing without the extra `report`, and CaptureFailed if it cannot be written."""
        from replayfmt.benchmark.result_files import output_file
        from replayfmt.report.contents import ReportInputs, make_contents
        from replayfmt.report.page import make_page
        from replayfmt.version import own_version

        with output_file("report", path, force) as file:
            file.write(make_page(make_contents(self.reader, ReportInputs()), own_version()))

    def _repr_html_(self) -> str:
        from replayfmt.dump.definitions import capture_html

        return capture_html(self.reader)

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"<capture {self.path}: {len(self.ops):,} ops of {len(self.kernels):,} kernels{state}>"

    def close(self) -> None:
        self.reader.close()


def open(path: str | PathLike[str]) -> Capture:
    """Open a capture for looking at it. See `Capture`."""
    return Capture(path)
