"""The family of recipes: how content is synthesized that was not captured."""

from __future__ import annotations

import numpy as np

from ..codes import DType
from ..container.frames import MAX_LENGTH
from ..model import Recipe, Statistics
from .checks import TablesBody
from .family import DefinitionColumns, DefinitionRow, Family, whole

_LAST_DTYPE = int(max(DType))
_SEED = 0xFFFFFFFFFFFFFFFF
_MOMENTS = ("mean", "std", "min", "max")
_COUNTS = ("zeros", "nans", "positive_infinities", "negative_infinities")


class RecipeFamily(Family[Recipe]):
    name = "recipe"
    fields = """
        recipe_dtype:[ubyte] recipe_elements:[ulong] recipe_seed:[ulong] recipe_statistics:[ubyte]
        recipe_mean:[double] recipe_std:[double] recipe_min:[double] recipe_max:[double]
        recipe_zeros:[ulong] recipe_nans:[ulong]
        recipe_positive_infinities:[ulong] recipe_negative_infinities:[ulong]
    """

    def row(self, definition: Recipe) -> DefinitionRow:
        if not 1 <= definition.dtype <= _LAST_DTYPE:
            raise ValueError(f"a recipe with the dtype {definition.dtype!r}")
        elements, known = definition.elements, definition.statistics
        whole(elements, 0, MAX_LENGTH, "a recipe's number of elements")
        whole(definition.seed, 0, _SEED, "a recipe's seed")
        moments = [float(getattr(known, name)) if known else 0.0 for name in _MOMENTS]
        counts = [whole(getattr(known, name), 0, elements, name) if known else 0 for name in _COUNTS]
        if sum(counts) > elements:
            raise ValueError(f"statistics that count {counts} special elements of {elements}")
        return DefinitionRow(
            (int(definition.dtype), elements, definition.seed, int(known is not None), *moments, *counts)
        )

    def at(self, rows: DefinitionColumns, row: int) -> Recipe:
        statistics = None
        if rows.number("recipe_statistics", row):
            mean, std, lowest, highest = (float(rows.column(f"recipe_{name}")[row]) for name in _MOMENTS)
            counts = (rows.number(f"recipe_{name}", row) for name in _COUNTS)
            statistics = Statistics(mean, std, lowest, highest, *counts)
        return Recipe(
            DType(rows.number("recipe_dtype", row)),
            rows.number("recipe_elements", row),
            rows.number("recipe_seed", row),
            statistics,
        )

    def check(self, body: TablesBody) -> None:
        body.code("recipe_dtype", _LAST_DTYPE)
        body.range("recipe_elements", 0, MAX_LENGTH)
        body.range("recipe_statistics", 0, 1)
        names = tuple(f"recipe_{name}" for name in (*_MOMENTS, *_COUNTS))
        body.zero_where(body.columns["recipe_statistics"] == 0, names, "a recipe without statistics")
        special = np.zeros(len(body.columns["recipe_elements"]), np.float64)
        for name in _COUNTS:
            special += body.columns[f"recipe_{name}"]
        if (special > body.columns["recipe_elements"]).any():
            raise body.fail("a recipe's statistics count more elements than it has")


RECIPES = RecipeFamily()
