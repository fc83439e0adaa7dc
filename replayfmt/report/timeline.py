"""Lanes of bars below each other, from their own beginning, and neighbours put together where a picture has no room for
each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .lanes import Lane, Names

_MOST_BARS = 250_000  # in a page; beyond, neighbours are put together before it is written
_MOST_LANES = 40


@dataclass(frozen=True)
class Bars:
    """Bars by lane and start; `lane` and `name` index the timeline's. Times are nanoseconds. A bar of `count` ops
    spans them all; `busy` is the sum of their times; `name`, `site` (its call site's number) and `ordinal` are those of
    the one that took longest. Of scopes `site` is 0."""

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    count: np.ndarray
    name: np.ndarray
    site: np.ndarray
    ordinal: np.ndarray

    def __len__(self) -> int:
        return len(self.lane)


@dataclass(frozen=True)
class Timeline:
    """Lanes from top to bottom. Times count from the first op or scope. `bars` are ops, `scopes` passes through scopes;
    `names` are shared by the timelines of a page."""

    lanes: list[str]
    names: list[str]
    bars: Bars
    scopes: Bars
    lanes_left_out: int


def timeline_of(lanes: Sequence[Lane], names: Names) -> Timeline:
    """Of one lane at least."""
    origin = min(int(lane.start.min()) for lane in lanes)
    shown = list(enumerate(lanes[:_MOST_LANES]))
    ops, scopes = (
        merged(_bars([(place, lane) for place, lane in shown if lane.scopes is wanted], origin), _MOST_BARS)
        for wanted in (False, True)
    )
    labels = [lane.label for _place, lane in shown]
    return Timeline(labels, names.all(), ops, scopes, len(lanes) - len(shown))


def merged(bars: Bars, most: int) -> Bars:
    """The same bars where there are at most `most`; else about so many, of neighbours in one lane put together."""
    if len(bars) <= most:
        return bars
    lanes = len(np.unique(bars.lane))
    cells = max(1, most // lanes)
    width = max(1, -(-int(bars.end.max()) // cells))
    key = bars.lane * (cells + 2) + bars.start // width
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    group = np.cumsum(np.concatenate([[False], key[1:] != key[:-1]]))
    longest = np.lexsort((-bars.busy, group))[first]
    return Bars(
        bars.lane[first],
        bars.start[first],
        np.maximum.reduceat(bars.end, first),
        np.add.reduceat(bars.busy, first),
        np.add.reduceat(bars.count, first),
        bars.name[longest],
        bars.site[longest],
        bars.ordinal[longest],
    )


def _bars(lanes: list[tuple[int, Lane]], origin: int) -> Bars:
    """The bars of lanes, each with its place; times count from `origin`."""

    def joined(columns: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *columns])

    lane = joined([np.full(len(each.start), place) for place, each in lanes])
    start = joined([each.start - origin for _place, each in lanes])
    order = np.lexsort((start, lane))
    lane, start = lane[order], start[order]
    taken = np.maximum(joined([each.taken for _place, each in lanes])[order], 0)
    others = (joined([getattr(each, name) for _place, each in lanes])[order] for name in _OF_EACH)
    return Bars(lane, start, start + taken, taken, np.ones(len(order), np.int64), *others)


_OF_EACH = ("name", "site", "ordinal")
