"""Tables of figures, as text and as JSON, and exact distributions of whole numbers.

An evaluation's result has `tables` (one row for the whole first), `notes` (what a reader must know to understand the
figures) and what its picture needs. Each name of a column ends in its unit. What the recording does not tell is an
`Unmeasured` with the reason, never 0. A distribution is gathered in parts, in memory that grows with the different
values alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Unmeasured:
    """In the place of a figure: why there is none. Not zero."""

    reason: str


_ROWS_ACROSS = 4  # a table of so few rows and more columns is turned

Cell: TypeAlias = "int | float | str | Unmeasured"


@dataclass(frozen=True)
class ResultTable:
    """Named columns, whose names end in their units, and rows. `more`: rows that were left out at the end."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    more: int = 0


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation: `kind` names it, `sources` are the files."""

    kind: str
    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]


def as_json(result: Evaluated) -> dict[str, Any]:
    """A result for JSON: each table is a list of objects. A figure that is not there is `{"not_measured": reason}`."""
    return {
        "kind": result.kind,
        "sources": list(result.sources),
        "notes": list(result.notes),
        "tables": {
            table.name: [dict(zip(table.columns, map(plain, row), strict=True)) for row in table.rows]
            for table in result.tables
        },
        "rows_left_out": {table.name: table.more for table in result.tables if table.more},
    }


def plain(cell: Cell) -> Any:
    """A figure for JSON."""
    if isinstance(cell, Unmeasured):
        return {"not_measured": cell.reason}
    if isinstance(cell, float) and not math.isfinite(cell):
        return {"not_measured": f"the figure is {cell}"}
    return cell


def as_text(result: Evaluated) -> list[str]:
    """A result as lines: a table of one row as names and figures, the others with a line of names above; with a column
    for each row where there are few."""
    found = [f"{result.kind}: {', '.join(result.sources)}"]
    for table in result.tables:
        found += ["", table.name]
        if len(table.rows) == 1:
            width = max(map(len, table.columns))
            found += [
                f"  {name:{width}}  {shown(cell)}" for name, cell in zip(table.columns, table.rows[0], strict=True)
            ]
        elif len(table.rows) <= _ROWS_ACROSS < len(table.columns):
            turned = list(zip(table.columns, *table.rows, strict=True))
            found += _grid(ResultTable(table.name, tuple(map(shown, turned[0])), turned[1:]))
        elif table.rows:
            found += _grid(table)
        else:
            found.append("  none")
        if table.more:
            found.append(f"  … and {table.more:,} more")
    return found + [""] * bool(result.notes) + [f"note: {note}" for note in result.notes]


def _grid(table: ResultTable) -> list[str]:
    cells = [[shown(cell) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *cells, strict=True)]
    # Names to the left, figures to the right.
    left = [all(isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]
    return [
        "  " + "  ".join(f"{text:{'<' if to_left else '>'}{width}}" for text, width, to_left in zip(row, widths,
        left, strict=True)).rstrip() for row in [table.columns, *cells]
    ]  # fmt: skip


def shown(cell: Cell) -> str:
    """A figure for people: at most five digits after those that every reader needs."""
    if isinstance(cell, Unmeasured):
        return f"not measured: {cell.reason}"
    if isinstance(cell, float):
        if not math.isfinite(cell):
            return f"not measured: the figure is {cell}"
        return f"{cell:,.1f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


Numbers = np.ndarray[Any, np.dtype[Any]]
QUANTILES = (("p25", 0.25), ("median", 0.5), ("p75", 0.75), ("p90", 0.9), ("p99", 0.99))


class Distribution:
    """Values with how often each occurs."""

    def __init__(self) -> None:
        self.values: Numbers = np.empty(0, np.int64)
        self.counts: Numbers = np.empty(0, np.int64)

    def add(self, values: Numbers, counts: Numbers | None = None) -> None:
        """Add integers, each once or `counts` times."""
        if counts is None:
            values, counts = np.unique(values, return_counts=True)
        self.values, where = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        together = np.zeros(len(self.values), np.int64)
        np.add.at(together, where, np.concatenate([self.counts, counts]))
        self.counts = together

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        return int(sum(int(value) * int(count) for value, count in zip(self.values, self.counts, strict=True)))

    @property
    def mean(self) -> float:
        return self.total / self.count

    def quantile(self, share: float) -> int:
        """The smallest value that at least `share` of all are not above."""
        place = np.searchsorted(np.cumsum(self.counts), math.ceil(share * self.count - 1e-9))
        return int(self.values[min(int(place), len(self.values) - 1)])

    def above(self, limit: int) -> int:
        return int(self.counts[self.values > limit].sum())

    def figures(self, name: str, unit: str, none: str) -> dict[str, Cell]:
        """Minimum, quantiles, maximum and mean as columns `<name>_min_<unit>` and so on; `none`: why there are none."""
        names = ["min", *(each for each, _share in QUANTILES), "max", "mean"]
        if not self.count:
            return {f"{name}_{each}_{unit}": Unmeasured(none) for each in names}
        found = [
            int(self.values[0]),
            *(self.quantile(share) for _name, share in QUANTILES),
            int(self.values[-1]),
            self.mean,
        ]
        return {f"{name}_{each}_{unit}": value for each, value in zip(names, found, strict=True)}
