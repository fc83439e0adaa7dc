"""Where the records of a capture are cut into windows, each of which becomes one straight-line function.

Cuts depend on what is near them, not on how far they are from the start of the capture, so that a step that is
repeated is cut at the same places every time and its code must be compiled only once. Scope boundaries come first,
the outermost ones before inner ones; without them a hash of the ops just before decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayfmt.format.codes import RecordKind

_HASHED_OPS = 8  # how many ops before a place decide whether it is cut there
_SCOPE_LEVELS = 63
_HASH_BITS = 48
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class WindowSize:
    """Bounds of a window in records.

    `staged_bytes` bounds what is imported ahead of it; None: by what the capture is known to have had alive at most.
    """

    least: int = 512
    most: int = 4096
    staged_bytes: int | None = None


class CutFinder:
    """Finds the cuts while records are fed in order."""

    def __init__(self, window: WindowSize) -> None:
        self._window = window
        self._cuts: list[int] = []
        self._start = 0  # where the window being looked for begins
        self._scores = np.zeros(0, dtype=np.uint64)  # score of a cut before record start + i
        self._recent = np.zeros(_HASHED_OPS, dtype=np.uint64)  # signatures of the last ops
        self._last_kind = RecordKind.none
        self._depth = 0

    def feed(self, signatures: np.ndarray, kinds: np.ndarray) -> None:
        """The next records. A cut before record n is judged by the records up to n."""
        if not len(kinds):
            return
        self._scores = np.concatenate([self._scores, self._score(signatures, kinds)])
        self._choose()

    def finish(self) -> list[int]:
        """Ordinals of the first record of every window but the first."""
        return self._cuts

    def _choose(self) -> None:
        least, most = self._window.least, self._window.most
        while len(self._scores) > most:
            candidates = self._scores[least : most + 1]
            length = least + int(np.argmax(candidates))
            self._start += length
            self._cuts.append(self._start)
            self._scores = self._scores[length:]

    def _score(self, signatures: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """How good a place each record's beginning is for a cut; 0 for never."""
        before = np.concatenate([[self._last_kind], kinds[:-1]])
        steps = (kinds == RecordKind.scope_begin).astype(np.int64) - (kinds == RecordKind.scope_end)
        depth_before = self._depth + np.concatenate([[0], np.cumsum(steps)[:-1]])
        at_scope = (before == RecordKind.scope_end) | (
            (kinds == RecordKind.scope_begin) & (before != RecordKind.scope_begin)
        )
        level = np.clip(_SCOPE_LEVELS - depth_before, 1, _SCOPE_LEVELS).astype(np.uint64)
        after_op = before == RecordKind.op
        hashes = self._hashes_before(signatures, kinds)
        scores = np.where(after_op, hashes | np.uint64(1), np.uint64(0))
        scores = np.where(at_scope, level << np.uint64(_HASH_BITS), scores)
        self._depth += int(steps.sum())
        self._last_kind = RecordKind(int(kinds[-1]))
        return scores

    def _hashes_before(self, signatures: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """For each record, a hash of the signatures of the last ops before it."""
        is_op = kinds == RecordKind.op
        ops = np.concatenate([self._recent, signatures[is_op].astype(np.uint64) + np.uint64(1)])
        rolling = np.zeros(len(ops) - _HASHED_OPS + 1, dtype=np.uint64)
        for lag in range(_HASHED_OPS):
            end = len(ops) - lag
            part = ops[_HASHED_OPS - 1 - lag : end] * _MULTIPLIER
            part ^= part >> np.uint64(29)
            rolling = rolling * _MULTIPLIER + part
        rolling ^= rolling >> np.uint64(32)
        rolling *= _MULTIPLIER
        rolling >>= np.uint64(64 - _HASH_BITS)
        self._recent = ops[-_HASHED_OPS:]
        ops_before = np.concatenate([[0], np.cumsum(is_op)[:-1]]).astype(np.int64)
        return rolling[ops_before]
