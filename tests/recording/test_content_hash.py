"""The hash by which the native recorder tells the contents of watched memory apart."""

from __future__ import annotations

import numpy as np
import pytest

from replayfmt.native.hook import DispatchHook, dispatch_hook

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def _hash(content: bytes) -> int:
    keys, lanes = [_mixed(index) for index in range(24)], list(range(1, 9))
    padded = content + bytes(64 - len(content) % 64)
    for number, words in enumerate(np.frombuffer(padded, "<u8").reshape(-1, 8).tolist()):
        if number and number % 16 == 0:
            lanes = [((lane ^ lane >> 47 ^ keys[16 + at]) * 0x9E3779B1) & _MASK for at, lane in enumerate(lanes)]
        keyed = [word ^ keys[number % 16 + at] for at, word in enumerate(words)]
        products = [(key & 0xFFFFFFFF) * (key >> 32) for key in keyed]
        lanes = [(lane + products[at] + words[at ^ 1]) & _MASK for at, lane in enumerate(lanes)]
    result = len(content)
    for lane in lanes:
        result = _mixed(result ^ lane)
    return result


def test_the_hash_is_the_same_whatever_registers_the_processor_has() -> None:
    hook = dispatch_hook()
    if not isinstance(hook, DispatchHook):
        pytest.skip("the native recorder is not available")
    content_hash = hook.session(0, 1000, True, 1 << 32).content_hash
    content = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    content[2000:2500] = 0
    for length in (0, 1, 63, 64, 65, 1000, 1023, 1024, 1025, 2048, 4999):
        for begin in (0, 1):
            part = content[begin : begin + length]
            assert content_hash(part.ctypes.data, len(part)) == _hash(part.tobytes()), (begin, length)
