"""The family of devices."""

from __future__ import annotations

from ..model import Device
from .checks import TablesBody
from .family import DefinitionColumns, DefinitionRow, Family


class DeviceFamily(Family[Device]):
    name = "device"
    fields = "device_kind:[uint] device_index:[int] device_name:[uint] device_fingerprint:[uint]"

    def row(self, definition: Device) -> DefinitionRow:
        return DefinitionRow((definition.kind, definition.index, definition.name, definition.fingerprint or 0))

    def at(self, rows: DefinitionColumns, row: int) -> Device:
        return Device(
            rows.text("device_kind", row),
            rows.number("device_index", row),
            rows.text("device_name", row),
            rows.text("device_fingerprint", row),
        )

    def check(self, body: TablesBody) -> None:
        body.ids("device_kind", "string")
        body.ids("device_name", "string")
        body.ids("device_fingerprint", "string", lowest=0)
        body.range("device_index", -1, 0x7FFFFFFF)


DEVICES = DeviceFamily()
