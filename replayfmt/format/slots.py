"""Where records keep their slots: which values take some, how many a signature has, and which are whose.

The n-th record's slots follow those of the records before it. Within a record each of the columns tensors, ints and
floats is numbered for itself, along the signature's nodes in pre-order, arguments before results.
"""

from __future__ import annotations

import numpy as np

from .codes import ValueKind
from .model import SLOTS

COLUMNS = ("tensors", "ints", "floats")
_BY_KIND = np.zeros((3, max(ValueKind) + 1), np.int64)
for _kind, _taken in SLOTS.items():
    _BY_KIND[:, _kind] = _taken


def slot_counts(kinds: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """How many tensor, int and float slots records of each signature have: int64[3, signatures]. `kinds` are the value
    kinds of all nodes, `nodes` says how many of them each signature has."""
    running = np.zeros((3, len(kinds) + 1), np.int64)
    np.cumsum(_BY_KIND.take(kinds, axis=1), axis=1, out=running[:, 1:])
    ends = np.concatenate(([0], np.cumsum(nodes, dtype=np.int64)))
    return np.diff(running.take(ends, axis=1), axis=1)
