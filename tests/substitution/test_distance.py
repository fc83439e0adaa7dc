"""How far tensors are apart: exact in every dtype, and about what is not finite."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.replay.substitution.distance import Distance, Tolerance, distance, largest_ulp

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def apart(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance = Tolerance()) -> Distance:  # noqa: B008
    return distance(expected, got, tolerance)


def of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(bits, dtype=INTEGER[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_one_unit_apart_in_every_width(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0]).to(dtype)
    bits = int(one.view(INTEGER[dtype.itemsize])[0])
    for units in (1, 3):
        above = of_bits([bits + units], dtype)
        assert largest_ulp(one, above) == units
        assert largest_ulp(torch.tensor([-1.0]).to(dtype), one) == 2 * bits
        assert (
            apart(one, above).largest_absolute == float(above.to(torch.float32) if dtype.itemsize == 1 else above) - 1.0
        )


def test_the_distance_of_the_largest_doubles_does_not_overflow() -> None:
    most = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    bits = struct.unpack("<q", struct.pack("<d", float(most)))[0]
    assert largest_ulp(most, -most) == 2 * bits > 2**63


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_units_in_the_last_place_are_counted_as_the_numbers_between(one: float, other: float) -> None:
    def place(value: float) -> int:
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        return bits if bits >= 0 else -(bits & (2**63 - 1))

    pair = [torch.tensor([value], dtype=torch.float64) for value in (one, other)]
    assert largest_ulp(*pair) == abs(place(one) - place(other))


def test_exponents_without_a_sign_are_counted_too() -> None:
    low, high = of_bits([1], torch.float8_e8m0fnu), of_bits([254], torch.float8_e8m0fnu)
    assert largest_ulp(low, high) == 253
    assert apart(of_bits([127, 255], torch.float8_e8m0fnu), of_bits([127, 255], torch.float8_e8m0fnu)).different == 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_nan_agrees_with_nan_alone(dtype: torch.dtype) -> None:
    nan = torch.tensor([math.nan, 1.0]).to(dtype)
    assert (apart(nan, nan).different, apart(nan, nan).beyond) == (0, 0)
    wrong = apart(nan, torch.tensor([1.0, 1.0]).to(dtype))
    assert (wrong.not_finite, wrong.beyond, wrong.largest_absolute) == (1, 1, 0.0)
    assert apart(torch.tensor([1.0, 1.0]).to(dtype), nan).beyond == 1


def test_infinities_agree_only_with_themselves_and_never_enter_the_distances() -> None:
    expected = torch.tensor([math.inf, -math.inf, math.inf, 2.0])
    got = torch.tensor([math.inf, math.inf, 3.4e38, 2.0])
    found = apart(expected, got)
    assert found == Distance(4, 2, 2, 2, 0.0, 0.0, 0)
    only = apart(expected[:1], expected[:1])
    assert only == Distance(1, 0, 0, 0, None, None, None)


def test_zero_and_minus_zero_agree() -> None:
    found = apart(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert found == Distance(1, 0, 0, 0, 0.0, None, 0)


def test_the_distances_are_the_largest_of_all_elements() -> None:
    found = apart(torch.tensor([1.0, 100.0, 0.0]), torch.tensor([1.5, 101.0, 0.25]))
    assert (found.elements, found.different) == (3, 3)
    assert found.largest_absolute == 1.0 and found.largest_relative == 0.5
    assert found.largest_ulp == largest_ulp(torch.tensor([0.0]), torch.tensor([0.25]))


def test_integers_and_bools_agree_or_do_not() -> None:
    found = apart(torch.tensor([2**62, 5, 0]), torch.tensor([2**62 + 1, 5, 0]))
    assert (found.different, found.beyond, found.largest_ulp) == (1, 1, None)
    assert apart(torch.tensor([True, False]), torch.tensor([True, True])).beyond == 1
    assert apart(torch.tensor([3], dtype=torch.uint16), torch.tensor([3], dtype=torch.uint16)).beyond == 0
    assert apart(torch.tensor([1, 2]), torch.tensor([1, 2]), Tolerance(1.0, 1.0)).beyond == 0
    assert apart(torch.tensor([1, 2]), torch.tensor([1, 3]), Tolerance(1.0, 1.0)).beyond == 1


def test_complex_numbers_are_apart_by_their_magnitude() -> None:
    found = apart(torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j]))
    assert (found.elements, found.largest_absolute, found.largest_relative) == (1, 0.5, 0.1)
    half = torch.zeros(2, dtype=torch.complex32)
    assert apart(half, half).beyond == 0


@pytest.mark.parametrize(
    ("tolerance", "beyond"),
    [
        (Tolerance(), 1),  # 1e-3 of the larger of the value and the root mean square, about 0.7
        (Tolerance(relative=0.01), 0),
        (Tolerance(relative=0.0), 2),
        (Tolerance(absolute=0.0), 2),  # the small one is no longer measured by the others
        (Tolerance(absolute=0.002), 0),
        (Tolerance(relative=0.0, absolute=0.001), 1),
    ],
)
def test_what_is_too_far_follows_the_tolerance(tolerance: Tolerance, beyond: int) -> None:
    found = apart(torch.tensor([1.0, 0.001, 0.0]), torch.tensor([1.002, 0.0011, 0.0]), tolerance)
    assert found.beyond == beyond


def test_strides_and_chunks_play_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(7, 5)
    moved = values + 0.001 * torch.randn(7, 5)
    whole = apart(values, moved)
    monkeypatch.setattr("replayfmt.replay.substitution.distance._CHUNK", 4)
    assert apart(values, moved) == whole
    assert apart(values.t(), moved.t().contiguous()) == whole
    assert apart(values.to(torch.complex64).conj(), values.to(torch.complex64)).beyond == 0


def test_bytes_of_packed_numbers_agree_or_do_not() -> None:
    packed = torch.tensor([1, 2], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    other = torch.tensor([1, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert apart(packed, packed).beyond == 0
    assert apart(packed, other) == Distance(2, 1, 0, 1)


def test_nothing_is_apart_where_there_is_nothing() -> None:
    assert apart(torch.ones(0), torch.ones(0)) == Distance()


@pytest.mark.parametrize("values", [[], [0.0], [1.0, 2.0], [math.nan], [math.inf, -math.inf], [math.nan, 0.0, 1.0]])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_the_quick_way_for_equal_bits_finds_what_the_long_way_finds(
    dtype: torch.dtype, values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.tensor(values).to(dtype)
    quick = apart(tensor, tensor)
    monkeypatch.setattr("replayfmt.replay.substitution.distance._same_bits", lambda *_pair: False)
    assert apart(tensor, tensor) == quick
