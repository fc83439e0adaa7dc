"""jq over rows: a filter compiled once and applied to each row, its results as `jq -c` prints them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from replayfmt.errors import OpReplayError, UsageError

LARGEST = 1.7976931348623157e308
_UNLIKE_JQ = re.compile(r"NaN|Infinity|[0-9]{18}")  # in text that json.dumps made: worth a second look


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
            self._program = jq.compile(text)
        except ValueError as error:
            raise UsageError(f"--jq: {message(error)}") from None

    def apply(self, chunks: Iterable[str]) -> Iterator[str]:
        """Chunks of rows as chunks of results, a line each. Raises FilterFailed at the first row that it fails on."""
        for chunk in chunks:
            results: list[str] = []
            for row in chunk.splitlines():
                try:
                    # One row at a time, so that an error belongs to a row. It costs no more than many at once.
                    results += map(compact, self._program.input_text(row))
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


def compact(value: Any) -> str:
    """A result as one line of JSON."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if _UNLIKE_JQ.search(text):
        text = json.dumps(as_jq_prints(value), separators=(",", ":"), ensure_ascii=False)
    return text + "\n"


def as_jq_prints(value: Any) -> Any:
    """The value with numbers as jq prints them: NaN is null, infinities are the largest doubles, and whole numbers of
    more than 17 digits, which the binding gives as int, are the doubles they were."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(LARGEST, value)
    if isinstance(value, int) and abs(value) >= 10**17:
        return float(value)
    if isinstance(value, dict):
        return {key: as_jq_prints(item) for key, item in value.items()}
    return [as_jq_prints(item) for item in value] if isinstance(value, list) else value


def abridged(row: str) -> str:
    """Enough of a row to find it."""
    return row if len(row) <= 200 else row[:200] + "…"
