"""The family of scopes. A scope is a path: the same name under the same parent has one id."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..model import Scope
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family


class ScopeFamily(Family[Scope]):
    name = "scope"
    fields = "scope_parent:[uint] scope_name:[uint]"

    def row(self, definition: Scope) -> DefinitionRow:
        return DefinitionRow((definition.parent, definition.name))

    def admit(self, definition: Scope, defined: DefinedSoFar) -> None:
        if definition.parent:
            defined.require("scope", definition.parent)

    def at(self, rows: DefinitionColumns, row: int) -> Scope:
        return Scope(rows.number("scope_parent", row), rows.text("scope_name", row))

    def check(self, body: TablesBody) -> None:
        body.ids("scope_name", "string")
        parents = body.columns["scope_parent"].astype(np.int64)
        # A parent comes before its children, so that paths are finite.
        if (parents >= np.arange(len(parents)) + body.firsts["scope"]).any():
            raise body.fail("a scope's parent is not defined before it")

    def repeats(self, column: Callable[[str], np.ndarray]) -> bool:
        """Whether one path has two ids, among all the scopes of a capture."""
        paths = np.stack([column(name) for name in self.columns], axis=1)
        return len(np.unique(paths, axis=0)) != len(paths)


SCOPES = ScopeFamily()
