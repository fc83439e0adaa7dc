"""jq over rows: a filter compiled once and applied to each row, its results as `jq -c` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.printable import printable_json

# jq itself prints the results: as Python objects they would have lost the sign of -0 and the digits of long integers.
# An empty line before, because a comment that ends in a backslash goes on in the next one.
_PRINTED = "\n\n| tojson"


class FilterFailed(OpReplayError):
    """A jq filter raised an error on a row."""

    status = "INVALID_ARGUMENT"


class Query:
    """A compiled jq filter."""

    def __init__(self, text: str) -> None:
        """Raises UsageError, with jq's own message, where the filter does not compile."""
        # Only here, so that a dump without a filter works where the binding is missing.
        import jq  # type: ignore[import-not-found]

        try:
            jq.compile(text)
        except ValueError as error:
            raise UsageError(f"--jq: {message(error)}") from None
        self._program = jq.compile(text + _PRINTED)

    def apply(self, chunks: Iterable[str]) -> Iterator[str]:
        """Chunks of rows as chunks of results, a line each. Raises FilterFailed at the first row that it fails on."""
        for chunk in chunks:
            results: list[str] = []
            for row in chunk.splitlines():
                try:
                    # One row at a time, so that an error belongs to a row. It costs no more than many at once.
                    results += (f"{printable_json(result)}\n" for result in self._program.input_text(row))
                except ValueError as error:
                    yield "".join(results)
                    raise FilterFailed(
                        f"--jq: {message(error)}; the filter failed on this row: {abridged(row)}") from None
            yield "".join(results)


def message(error: ValueError) -> str:
    """jq's message on one line, without its count of errors and the mark it puts below the place it quotes."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line.removeprefix("jq: error: ") for line in lines
                    if line.strip("^") and not re.fullmatch(r"jq: \d+ compile errors?", line))


def abridged(row: str) -> str:
    """Enough of a row to find it."""
    return row if len(row) <= 200 else row[:200] + "…"
