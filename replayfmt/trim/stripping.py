"""A capture without any content: only metadata, safe to share.

Left out: payloads, external files, recipes, digests, host reads' values, scalars that ops returned to the program,
generators' states, host name, user, paths and command line. Nothing is replayed, so it works without torch, and on
captures that cannot be replayed.
"""

from __future__ import annotations

from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.model import GeneratorValue, Record
from replayfmt.format.reader import CaptureReader

from .copying import Copier
from .schedule import Enter, Planner, Schedule
from .selection import Kept
from .writing import EnteringContent, Writing

POLICIES = {"payload": "none", "digests": "none"}


class Absent:
    """No content at all."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def enter(self, action: Enter) -> EnteringContent:
        empty = not action.length or self._is_meta(action.storage)
        return EnteringContent(StorageOrigin.uninitialized if empty else StorageOrigin.absent, 0, action.length)

    def _is_meta(self, storage: int) -> bool:
        device = self._reader.devices[self._reader.storage(storage).device]
        return device is not None and device.kind == "meta"


class _Stripped(Writing):
    """Writes records without the values in them."""

    def record(self, record: Record) -> None:
        if record.kind is RecordKind.generator_state:
            generator = record.args[0]
            assert isinstance(generator, GeneratorValue)
            self.generator_state(record, generator.id, None)
        else:
            super().record(record)


def plan_stripped(reader: CaptureReader, kept: Kept) -> Schedule:
    """The prerequisites of a stripped capture of these records."""
    return Planner(reader, kept, None).plan()


def write_stripped(copier: Copier, schedule: Schedule, kept: Kept, *, annotate: bool) -> None:
    """Write the records of a stripped capture. The copier should redact."""
    _Stripped(copier, schedule, kept, Absent(copier.reader), annotate=annotate, values=False).finish()
