"""A progress bar for work that goes through the records of a capture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG = 20_000  # records; work on fewer shows no progress


@contextmanager
def record_bar(what: str, records: int) -> Iterator[Callable[..., None] | None]:
    """On stderr, if that is a terminal and `records` is large: `show(done)`, or `show(done, total)` if the total turns
    out to differ from `records`. None otherwise."""
    if records < _LONG or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=records)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)
