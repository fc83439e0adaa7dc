"""One Tables body while it is checked, and the rules that columns of many families have in common.

Vectorized, because a capture may define very many things. What passed can be turned into objects without looking again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from ..codes import MAJOR_VERSION, MINOR_VERSION
from ..container import flatbuffer_tables
from ..container.layouts import TableLayout


class TablesBody:
    """One Tables body. `strings` maps its strings to their ids, `columns` has its other columns, `counts` says how many
    ids each family has with it, `firsts` with which it begins."""

    def __init__(
        self,
        data: bytes,
        layout: TableLayout,
        minor: int,
        where: str,
        counts: Mapping[str, int],
        string_ids: Mapping[str, int],
        earlier: Callable[[str], np.ndarray],
        payload_bytes: np.ndarray,
    ) -> None:
        """`counts`, `string_ids` and `earlier` are what comes before: how many ids each family has, strings, columns.
        `payload_bytes` are the raw lengths of the payloads it may refer to, in order of their ids."""
        self._table = flatbuffer_tables.root(data, layout, where)
        self._layout = layout
        self._minor = minor
        self._where = where
        self._string_ids = string_ids
        self._earlier = earlier
        self._payload_bytes = payload_bytes
        self.firsts = {family: count + 1 for family, count in counts.items()}
        self.counts = dict(counts)
        self.columns: dict[str, np.ndarray] = {}
        self.strings: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------- what is in it

    def take_strings(self) -> None:
        """Read the strings. Raises InvalidCapture for one that is defined twice."""
        strings = self._table.strings("strings")
        self._begin("string", len(strings))
        self.strings = dict(zip(strings, range(self.firsts["string"], self.counts["string"] + 1), strict=True))
        if len(self.strings) != len(strings) or not self._string_ids.keys().isdisjoint(strings):
            raise self.fail("defines a string twice")

    def take(self, family: str, names: tuple[str, ...], nested: tuple[str, ...], added: tuple[str, ...] = ()) -> None:
        """Read a family's columns; those of `added` are 0 in every row where they are absent. Raises InvalidCapture if
        they have different lengths."""
        lengths: list[int] = []
        for name in names:
            lengths.append(len(self._get(name, lengths[0] if name in added else 0)))
        if len(set(lengths)) != 1:
            raise self.fail(f"{family} columns have different lengths: {dict(zip(names, lengths, strict=True))}")
        self._begin(family, lengths[0])
        if nested:
            counted = int(self.columns[names[-1]].sum(dtype=np.int64))
            for name in nested:
                if len(self._get(name)) != counted:
                    raise self.fail(f"{name} has {len(self.columns[name])} elements, {names[-1]} adds up to {counted}")

    def _begin(self, family: str, rows: int) -> None:
        first = self._table.scalar(f"first_{family}")
        if rows and first != self.firsts[family]:
            raise self.fail(f"defines {family} {first} and on; expected {self.firsts[family]}")
        self.counts[family] += rows

    def _get(self, name: str, absent_rows: int = 0) -> np.ndarray:
        column = self._table.column(name)
        if column is None:
            column = np.zeros(absent_rows, self._layout.dtype(name))
        self.columns[name] = column
        return column

    def whole(self, name: str) -> np.ndarray:
        """All rows of a column, with those before this body."""
        return np.concatenate((self._earlier(name), self.columns[name]))

    def string_id(self, text: str) -> int:
        """The id of a string that is defined by now, 0 if it is not."""
        return self._string_ids.get(text) or self.strings.get(text, 0)

    def texts(self, numbers: set[int]) -> dict[int, str]:
        """The strings with these ids."""
        known = (self._string_ids, self.strings)
        return {number: text for ids in known if numbers for text, number in ids.items() if number in numbers}

    # --------------------------------------------------------------------------------------------------------- rules

    def fail(self, what: str) -> InvalidCapture:
        """The error that says what is wrong."""
        return InvalidCapture(f"{self._where}: {what}")

    @property
    def is_newer(self) -> bool:
        """Whether a newer minor version wrote it, which may have codes of its own."""
        return self._minor > MINOR_VERSION

    def too_new(self, what: str) -> UnsupportedVersion:
        """The error that says what this reader does not know."""
        return UnsupportedVersion(
            f"{self._where}: {what}, from format version {MAJOR_VERSION}.{self._minor}; "
            f"this reader knows {MAJOR_VERSION}.{MINOR_VERSION}"
        )

    def range(self, name: str, lowest: int, highest: int, owner: Callable[[int], str] = "row {}".format) -> None:
        """A column holds nothing beyond these bounds. `owner` says what a row of it belongs to."""
        column = self.columns[name]
        if len(column) and not (lowest <= int(column.min()) and int(column.max()) <= highest):
            row = next(row for row, value in enumerate(column.tolist()) if not lowest <= value <= highest)
            raise self.fail(
                f"{name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}; the first wrong "
                f"one is {int(column[row])}, of {owner(row)}"
            )

    def ids(self, name: str, family: str, lowest: int = 1) -> None:
        """A column holds ids of a family; `lowest` 0: or none."""
        self.range(name, lowest, self.counts[family])

    def code(self, name: str, highest: int, lowest: int = 1) -> None:
        """A column holds codes of an enumeration, which a newer minor version may have extended."""
        column = self.columns[name]
        if self.is_newer and len(column) and int(column.max()) > highest:
            raise self.too_new(f"{name} holds {int(column.max())}")
        self.range(name, lowest, highest)

    def zero_where(self, unset: np.ndarray, names: tuple[str, ...], what: str) -> None:
        """Columns are 0 in the rows of `unset`, which are `what`."""
        for name in names:
            if (self.columns[name][unset] != 0).any():
                raise self.fail(f"{name} of {what} is not 0")

    def payload_ids(self, name: str, lowest: int = 1) -> None:
        """A column holds payload ids; `lowest` 0: or none."""
        self.range(name, lowest, len(self._payload_bytes))

    def payloads(self, name: str, lengths: str, what: str) -> None:
        """A column holds payload ids or 0, and each payload is as long as another column says."""
        self.payload_ids(name, lowest=0)
        payloads, expected = self.columns[name], self.columns[lengths]
        rows = np.flatnonzero(payloads)
        wrong = self._payload_bytes[payloads[rows].astype(np.int64) - 1] != expected[rows]
        if wrong.any():
            row = int(rows[np.argmax(wrong)])
            found = int(self._payload_bytes[int(payloads[row]) - 1])
            raise self.fail(f"{what} of {int(expected[row])} bytes has payload {int(payloads[row])}, of {found}")
