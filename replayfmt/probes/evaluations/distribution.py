"""The distribution of whole numbers, gathered in parts, exact, in memory that grows with the different values alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .tables import Cell, Unmeasured

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
        """How many are larger."""
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
