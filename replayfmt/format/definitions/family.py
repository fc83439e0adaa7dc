"""The protocol of a family of definitions: its columns, and how a definition is stored in them, read back, and checked.

Each family has a module of its own, named after it. What all of them share is done once for all: interning.py gives
definitions their ids, tables.py makes and reads Tables bodies, reading.py makes objects on demand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..model import Node
from .checks import TablesBody

T = TypeVar("T")


class DefinitionRow(NamedTuple):
    """A definition as the columns hold it, texts not yet replaced by their ids. `nested` has the rows of the nested
    columns."""

    values: tuple[int | float | str, ...]
    nested: Sequence[tuple[int | str, ...]] = ()


class DefinedSoFar(Protocol):
    """What the writer has when a definition comes."""

    def require(self, family: str, number: int) -> None:
        """Raise ValueError where no definition of a family has this id."""

    def column(self, name: str) -> np.ndarray: ...

    def payload_bytes(self, number: int) -> int:
        """How long a payload's content is. Raises ValueError for an id that is none."""


class DefinitionColumns(Protocol):
    """What the reader makes definitions out of: columns that were checked, and strings by id."""

    strings: tuple[str | None, ...]
    leaves: dict[tuple[int, int, int], Node]  # of signatures, by their rows: lists repeat the same one many times

    def column(self, name: str) -> np.ndarray: ...

    def number(self, name: str, row: int) -> int: ...

    def text(self, name: str, row: int) -> str:
        """The string that a column refers to; "" for 0."""

    def nested(self, family: str, row: int) -> slice:
        """Where a definition's rows of nested columns are."""


class Family(ABC, Generic[T]):
    """One family. `fields` are its columns with a row for each id, in the schema's words and order; `nested_fields`
    those with any number of rows for each, of which the last of the former says how many. `added_fields` continue
    `fields`: columns of a later minor version, at the table's end with the nested ones. They are absent where all of
    them are 0."""

    name: ClassVar[str]
    fields: ClassVar[str]
    added_fields: ClassVar[str] = ""
    nested_fields: ClassVar[str] = ""
    shared: ClassVar[bool] = True  # the same content gets the same id
    frequent: ClassVar[bool] = False  # the same few come again and again, for single records

    def __init__(self) -> None:
        own, self.added_columns, self.nested_columns = (
            tuple(field.partition(":")[0] for field in fields.split())
            for fields in (self.fields, self.added_fields, self.nested_fields)
        )
        self.columns = (*own, *self.added_columns)

    @abstractmethod
    def row(self, definition: T) -> DefinitionRow:
        """How a definition is stored. Raises ValueError if the format cannot hold it."""

    def admit(self, definition: T, defined: DefinedSoFar) -> None:
        """Raise ValueError where a definition contradicts those that it refers to."""

    @abstractmethod
    def at(self, rows: DefinitionColumns, row: int) -> T:
        """The definition in a row."""

    @abstractmethod
    def check(self, body: TablesBody) -> None:
        """Raise what `body` makes of a fault where its columns, which are there and of equal length, break a rule."""


def whole(value: int, lowest: int, highest: int, what: str) -> int:
    """An integer within bounds. Raises ValueError for others."""
    if not lowest <= value <= highest:
        raise ValueError(f"{what} is {value}, allowed {lowest}..{highest}")
    return int(value)
