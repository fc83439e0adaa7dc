"""The family of random generators. They have no content that could be the same: each has an id of its own."""

from __future__ import annotations

from ..model import Generator
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family


class GeneratorFamily(Family[Generator]):
    name = "generator"
    fields = "generator_device:[uint] generator_default:[ubyte]"
    shared = False

    def row(self, definition: Generator) -> DefinitionRow:
        return DefinitionRow((definition.device, int(definition.default)))

    def admit(self, definition: Generator, defined: DefinedSoFar) -> None:
        defined.require("device", definition.device)

    def at(self, rows: DefinitionColumns, row: int) -> Generator:
        return Generator(rows.number("generator_device", row), bool(rows.number("generator_default", row)))

    def check(self, body: TablesBody) -> None:
        body.ids("generator_device", "device")
        body.range("generator_default", 0, 1)


GENERATORS = GeneratorFamily()
