"""The family of placements: which streams are current where a record is issued, apart from the default ones."""

from __future__ import annotations

import numpy as np

from ..container.frames import MAX_LENGTH
from ..model import StreamPlacement
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family, whole


class PlacementFamily(Family[StreamPlacement]):
    name = "placement"
    fields = "placement_devices:[ushort]"
    nested_fields = "placement_device:[uint] placement_stream:[ulong]"
    frequent = True

    def row(self, definition: StreamPlacement) -> DefinitionRow:
        devices = [device for device, _stream in definition.streams]
        if not devices or devices != sorted(set(devices)):
            raise ValueError(f"a placement whose devices are not some, each once and in order: {devices}")
        for _device, stream in definition.streams:
            whole(stream, 1, MAX_LENGTH, "the number of a stream that is not its device's default one")
        return DefinitionRow((len(devices),), definition.streams)

    def admit(self, definition: StreamPlacement, defined: DefinedSoFar) -> None:
        for device, _stream in definition.streams:
            defined.require("device", device)

    def at(self, rows: DefinitionColumns, row: int) -> StreamPlacement:
        which = rows.nested("placement", row)
        devices, streams = (rows.column(name)[which].tolist() for name in ("placement_device", "placement_stream"))
        return StreamPlacement(tuple(zip(devices, streams, strict=True)))

    def check(self, body: TablesBody) -> None:
        body.range("placement_devices", 1, 0xFFFF)
        body.ids("placement_device", "device")
        body.range("placement_stream", 1, MAX_LENGTH)
        counts = body.columns["placement_devices"].astype(np.int64)
        devices = body.columns["placement_device"].astype(np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        if (np.diff(devices)[np.diff(owner) == 0] <= 0).any():
            raise body.fail("a placement's devices are not in ascending order")


PLACEMENTS = PlacementFamily()
