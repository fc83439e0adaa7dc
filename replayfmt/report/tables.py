"""Tables as plain values: what a cell says, what it is sorted by, and where it leads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from replayfmt.benchmark.reports.units import share_text
from replayfmt.format.printable import printable

LONGEST_TEXT = 400
_PREFIXES = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class TableCell:
    """`sort` is a number, or None for a text; "" sorts below every number. `about` is more text for whoever asks;
    `link` the name of a row elsewhere in the page, `find` what to filter the table of that row by."""

    text: str
    sort: float | str | None = None
    about: str = ""
    link: str = ""
    find: str = ""


@dataclass(frozen=True)
class TableColumn:
    """`figures`: it holds numbers, to the right."""

    title: str
    about: str = ""
    figures: bool = False


@dataclass(frozen=True)
class TableRow:
    """`name` is the row's own in the page, for links; "" if nothing leads to it."""

    cells: tuple[TableCell, ...]
    name: str = ""


@dataclass(frozen=True)
class ReportTable:
    """Rows are in the order in which they are first shown, by `sorted_by` (a column, largest first). `notes` stand
    below it."""

    name: str
    title: str
    columns: tuple[TableColumn, ...]
    rows: list[TableRow]
    sorted_by: int | None = None
    notes: list[str] = field(default_factory=list)


def text_cell(text: str, about: str = "", link: str = "", find: str = "") -> TableCell:
    """Text from anywhere, on one line."""
    return TableCell(printable(text, LONGEST_TEXT), None, printable(about), link, printable(find))


def count_cell(number: int) -> TableCell:
    return TableCell(f"{number:,}", number)


def figure_cell(value: float | None, unit: str, reason: str, about: str = "") -> TableCell:
    """A figure in a base unit (s, B, J, FLOP/s, %); `not measured` with the reason if there is none."""
    if value is None or not math.isfinite(value):
        return TableCell(NOT_MEASURED, "", printable(reason or "no reason is known"))
    return TableCell(si(value, unit), value, printable(about))


def si(value: float, unit: str) -> str:
    """Four digits with a fitting prefix: 1.234 ms. A share as 12.3%."""
    if unit == "%":
        return share_text(value)
    if unit == "×":
        return f"{value:.3f} ×"
    if not value:
        return f"0 {unit}"
    scale, prefix = next((pair for pair in _PREFIXES if abs(value) >= pair[0] * 0.99995), _PREFIXES[-1])
    if prefix and scale < 1 and unit == "B":
        scale, prefix = 1.0, ""
    return f"{value / scale:.4g} {prefix}{unit}".rstrip()
