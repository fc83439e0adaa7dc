"""jq over rows: a filter compiled once and applied to each row, its results as `jq -c` prints them.

With `raw` strings are printed as they are, as `jq -r` does, with `slurp` the filter receives all rows as one array, as
with `jq -s`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.printable import printable, printable_json

# jq itself prints the results: as Python objects they would have lost the sign of -0 and the digits of long integers.
# An empty line comes first, because a comment that ends in a backslash continues on the next line.
_PRINTED = "\n\n| tojson"
_PRINTED_RAW = '\n\n| if type == "string" then [., true] else [tojson, false] end'


class FilterFailed(OpReplayError):
    """A jq filter raised an error on a row."""

    status = "INVALID_ARGUMENT"


class Query:
    """A compiled jq filter."""

    def __init__(self, text: str, *, raw: bool = False, slurp: bool = False) -> None:
        """Raises UsageError, with jq's own message, if the filter does not compile."""
        # Only here, so that a dump without a filter works where the binding is missing.
        import jq  # type: ignore[import-not-found]

        try:
            jq.compile(text)
        except ValueError as error:
            raise UsageError(f"--jq: {message(error)}") from None
        self._raw, self._slurp = raw, slurp
        self._program = jq.compile(text + (_PRINTED_RAW if raw else _PRINTED))

    def apply(self, chunks: Iterable[str]) -> Iterator[str]:
        """Chunks of rows as chunks of results, a line each. Raises FilterFailed at the first row that it fails on."""
        if self._slurp:
            rows = [row for chunk in chunks for row in chunk.splitlines()]
            chunks = [f"[{','.join(rows)}]\n"]
        for chunk in chunks:
            results: list[str] = []
            for row in chunk.splitlines():
                try:
                    # One row at a time, so that an error belongs to a row. It costs no more than many at once.
                    results += (f"{self._printed(result)}\n" for result in self._program.input_text(row))
                except ValueError as error:
                    yield "".join(results)
                    what = "the array of all rows" if self._slurp else "this row"
                    raise FilterFailed(
                        f"--jq: {message(error)}; the filter failed on {what}: {abridged(row)}"
                    ) from None
            yield "".join(results)

    def _printed(self, result: Any) -> str:
        if not self._raw:
            return printable_json(result)
        text, is_string = result
        # Lines and columns are the filter's own; whatever else a terminal would act on comes from a capture.
        return (
            "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
            if is_string
            else (printable_json(text))
        )


def message(error: ValueError) -> str:
    """jq's message on one line, without its count of errors and the mark it puts below the place it quotes."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(
        line.removeprefix("jq: error: ")
        for line in lines
        if line.strip("^") and not re.fullmatch(r"jq: \d+ compile errors?", line)
    )


def abridged(row: str) -> str:
    """Enough of a row to find it."""
    return row if len(row) <= 200 else row[:200] + "…"
