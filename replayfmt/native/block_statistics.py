"""Accumulates statistics of elements in C++, with helper threads if there are many elements: the Python side of
block_statistics.cpp.

A long call releases the GIL. The helper threads live only during the call: none is left when it returns, and a child
that another thread of the program forks meanwhile has none to wait for.
"""

from __future__ import annotations

import ctypes
import math
import os

import torch

from .building import library

BLOCK_ELEMENTS = 1 << 16  # as doubles they fit the L2 cache; in smaller blocks NumPy's calls cost more
_BLOCKS_A_THREAD = 64  # a millisecond of work or more: on a busy machine, a thread waits several for a processor
_MOST_THREADS = 8  # more threads only wait for memory
_LONG = 4 * BLOCK_ELEMENTS  # enough elements to make releasing the GIL worthwhile


class Totals(ctypes.Structure):
    """The statistics of the elements so far. `lowest` and `highest` are meaningless while `finite` is 0."""

    _fields_ = [
        ("nan", ctypes.c_int64),
        ("inf", ctypes.c_int64),
        ("finite", ctypes.c_int64),
        ("lowest", ctypes.c_double),
        ("highest", ctypes.c_double),
        ("total", ctypes.c_double),
        ("squares", ctypes.c_double),
    ]
    nan: int
    inf: int
    finite: int
    lowest: float
    highest: float
    total: float
    squares: float

    def __init__(self) -> None:
        super().__init__(0, 0, 0, math.inf, -math.inf, 0.0, 0.0)


class BlockStatistics:
    """The library. Raises NotAvailable if it cannot be loaded."""

    def __init__(self) -> None:
        found = library("block_statistics.cpp")
        self._short = _declared(found)
        self._long = _declared(ctypes.CDLL(found._name, handle=found._handle))

    def add(self, totals: Totals, address: int, count: int, kind: str) -> int:
        """Add `count` contiguous elements to `totals`, in blocks of BLOCK_ELEMENTS. Returns how many were added: whole
        blocks, or all. The rest is left to NumPy.

        `kind`: `d`, `f`, `e` or `g` for floating-point numbers of 64, 32, 16 bits and bfloat16; `b`, `h`, `i`, `q` for
        integers of 8, 16, 32, 64 bits, in capitals for unsigned ones.
        """
        if count < _LONG:
            return int(self._short(totals, address, count, ord(kind), 1))
        return int(self._long(totals, address, count, ord(kind), _threads(count)))


def _declared(found: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = found.opreplay_statistics
    function.argtypes = (ctypes.POINTER(Totals), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int64
    return function


def _threads(count: int) -> int:
    """How many threads are worth starting for `count` elements: at most as many as PyTorch may use, and as there are
    processors for this process."""
    most = min(count // (BLOCK_ELEMENTS * _BLOCKS_A_THREAD), _MOST_THREADS)
    if most < 2:
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(most, torch.get_num_threads(), processors)
