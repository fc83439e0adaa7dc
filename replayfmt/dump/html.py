"""A capture as HTML for notebooks: its summary, and a table of its kernels. Everything a capture says is escaped."""

from __future__ import annotations

from html import escape

from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader

from .definitions import SHOWN_LINE, summary_facts

_SHOWN_KERNELS = 50


def capture_html(reader: CaptureReader) -> str:
    """Two tables; of very many kernels only those called most."""
    calls = reader.summary.kernel_calls
    kernels = sorted(range(1, len(reader.kernels)), key=lambda number: (-calls.get(number, 0), number))
    facts = "".join(_row(name, value) for name, value in summary_facts(reader) if value)
    rows = "".join(
        _row(
            str(number),
            reader.kernels[number].qualified_name,
            f"{calls.get(number, 0):,}",
            reader.kernels[number].schema,
        )
        for number in kernels[:_SHOWN_KERNELS]
    )
    left = len(kernels) - _SHOWN_KERNELS
    more = f"<p>and {left:,} kernels that are called less</p>" if left > 0 else ""
    head = "".join(f"<th>{name}</th>" for name in ("id", "kernel", "calls", "schema"))
    return f"<table>{facts}</table><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{escape(printable(cell, SHOWN_LINE))}</td>" for cell in cells) + "</tr>"
