"""The distinct values of a column: np.unique without what NumPy imports at its first call."""

from __future__ import annotations

import numpy as np


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values of a one-dimensional array, ascending. np.unique imports numpy.ma, which is a large part of
    what it takes to start a command that only shows a few records."""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered
