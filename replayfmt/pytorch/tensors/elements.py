"""The elements of a strided view on host memory, in pieces that fit a processor's cache, without a copy of the whole.

A view has two orders: the logical one (row-major), in which its bytes are hashed and sampled, and the one in which it
lies in memory, which serves for everything that does not depend on an order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Dims = tuple[tuple[int, int], ...]  # (size, stride in elements) of each dimension, outermost first

# What carries the bits of an element of so many bytes.
_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


def merged(sizes: Sequence[int], strides: Sequence[int]) -> Dims:
    """The same elements in the same order with as few dimensions as possible, at least one. No size may be 0."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(dims) or ((1, 1),)


def in_memory_order(dims: Dims) -> Dims:
    """The same elements in the order of their places in memory."""
    if len(dims) == 1:
        return dims
    ordered = sorted(dims, key=lambda dim: -dim[1])
    return merged([size for size, _stride in ordered], [stride for _size, stride in ordered])


def array_of(memory: memoryview, item: int, dims: Dims, offset: int) -> np.ndarray:
    """The elements, `item` bytes each and `offset` elements into `memory`, as an array of their bits. Shares memory.

    Raises ValueError if they do not fit into it.
    """
    return np.ndarray(
        [size for size, _stride in dims],
        _CARRIERS[item],
        memory,
        offset * item,
        [stride * item for _size, stride in dims],
    )


def pieces(array: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """The elements in row-major order, in contiguous pieces of at most `most`. Copies only what is scattered."""
    if array.ndim == 1:
        for start in range(0, len(array), most):
            yield np.ascontiguousarray(array[start : start + most])
        return
    row = array[0].size
    if row > most:
        for part in array:
            yield from pieces(part, most)
        return
    rows = most // row
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).reshape(-1)
