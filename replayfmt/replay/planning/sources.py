"""Where content that enters a replay comes from, as the capture says it. Plain values."""

from __future__ import annotations

from typing import NamedTuple

from replayfmt.format.codes import StorageOrigin, ValueKind
from replayfmt.format.model import PayloadValue, RangeValue, RecipeValue, Value

# How a storage that was there before the first op that uses it may be born.
IMPORTED = (StorageOrigin.payload, StorageOrigin.absent, StorageOrigin.external_file, StorageOrigin.initializer)


# The reason of a first import whose storage was a map of the file that its content is in.
MAPPED_FILE = "mapped_file"


class ContentSource(NamedTuple):
    """`kind` is payload, range, recipe, or none where the capture has nothing; `id` is the id of that kind."""

    kind: ValueKind
    id: int


NOTHING = ContentSource(ValueKind.none, 0)


def source_of(value: Value) -> ContentSource:
    """The source that a storage import's `payload` argument names."""
    if isinstance(value, PayloadValue):
        return ContentSource(ValueKind.payload, value.id)
    if isinstance(value, RangeValue):
        return ContentSource(ValueKind.range, value.id)
    return ContentSource(ValueKind.recipe, value.id) if isinstance(value, RecipeValue) else NOTHING


class Entrance(NamedTuple):
    """Content that the capture does not have, entering a storage. `version` counts its imports from 0; `recipe` is a
    recipe id or 0. `ordinal` is the import's, -1 where there is no import record."""

    ordinal: int
    storage: int
    version: int
    recipe: int
