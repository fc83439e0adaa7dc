"""Which bytes captured ops wrote: against a plain map of bytes, for views of all kinds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.recording.content.coverage import ByteRegion, Coverage

pytestmark = pytest.mark.recorder("python")  # of no recorder at all

LENGTH = 96


@st.composite
def regions(draw: st.DrawFn) -> ByteRegion:
    item = draw(st.sampled_from([1, 2, 4]))
    sizes = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    strides = tuple(item * draw(st.integers(0, 6)) for _ in sizes)
    reach = sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True)) + item
    if reach > LENGTH:
        return ByteRegion(0, (2,), (item,), item)
    return ByteRegion(item * draw(st.integers(0, (LENGTH - reach) // item)), sizes, strides, item)


def cells(region: ByteRegion) -> np.ndarray:
    if region.empty:
        return np.zeros(0, np.int64)
    places = np.array([region.start])
    for size, stride in zip(region.sizes, region.strides, strict=True):
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return np.unique((places[:, None] + np.arange(region.item)).reshape(-1))


@pytest.mark.slow
@given(st.lists(regions(), max_size=8), regions())
def test_coverage_is_what_a_map_of_bytes_says(written: list[ByteRegion], asked: ByteRegion) -> None:
    coverage, expected = Coverage(LENGTH), np.zeros(LENGTH, bool)
    for region in written:
        if not region.empty:
            coverage.write(region)
            expected[cells(region)] = True
    assert coverage.covers(asked) == bool(expected[cells(asked)].all())
    assert not coverage.complete or expected.all()


@pytest.mark.parametrize(
    "region, dense",
    [
        (ByteRegion(0, (2, 3), (12, 4), 4), (0, 24)),
        (ByteRegion(8, (3, 2), (4, 12), 4), (8, 32)),  # transposed
        (ByteRegion(0, (2, 3), (16, 4), 4), None),
        (ByteRegion(0, (2, 3), (0, 4), 4), None),  # expanded
        (ByteRegion(4, (), (), 4), (4, 8)),
    ],
)
def test_dense_views_are_ranges(region: ByteRegion, dense: tuple[int, int] | None) -> None:
    assert region.dense() == dense
