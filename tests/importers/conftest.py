"""What the tests of the importers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replayfmt.format.maintenance import check_capture
from replayfmt.format.model import Record
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.importers.common.options import ImportOptions
from replayfmt.importers.common.report import ImportReport
from replayfmt.importers.kineto.importer import import_kineto
from replayfmt.pytorch.op_libraries import OpLibraries

from .traces import trace


class Imported(NamedTuple):
    """An imported trace: its report, its capture, and the records that are no storage's."""

    report: ImportReport
    reader: CaptureReader
    records: list[Record]

    @property
    def ops(self) -> list[str]:
        """`aten::mm.default` of each op, in order."""
        return [self.name(each) for each in self.records if each.kind.name == "op"]

    def name(self, record: Record) -> str:
        kernel = self.reader.kernels[record.signature.kernel]
        assert kernel is not None
        return kernel.qualified_name

    def scope(self, record: Record) -> str:
        return self.reader.scope_path(record.scope)

    def of(self, kind: str) -> list[Record]:
        return [each for each in self.records if each.kind.name == kind]


@pytest.fixture
def imported(tmp_path: Path) -> Any:
    """Imports events, or a trace file, and reads the capture back."""
    readers: list[CaptureReader] = []

    def make(
        events: list[dict[str, Any]] | Path,
        level: Any = "auto",
        unique: bool = False,
        libraries: Any = None,
        **top: Any,
    ) -> Imported:
        path = events if isinstance(events, Path) else trace(tmp_path / "trace.json", events, **top)
        out = tmp_path / "out.opreplay"
        options = ImportOptions(level, unique, libraries=libraries or OpLibraries())
        report = import_kineto(path, out, options, force=True)
        check_capture(out)
        reader = open_capture(out)
        readers.append(reader)
        records = [reader.record(ordinal) for ordinal in range(reader.record_count)]
        return Imported(report, reader, [each for each in records if not each.kind.name.startswith("storage_")])

    yield make
    for reader in readers:
        reader.close()


Import = Callable[..., Imported]
