"""Random edits of programs and captures: the known mapping is found, or refused, and never wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayfmt.compare.alignment import align
from replayfmt.compare.trace import read_trace
from replayfmt.format.reader import open_capture

from .programs import Op, Program, edited, layered, program_of, wrong_pairs

EDITS = settings(deadline=None, max_examples=50, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@EDITS
@given(st.integers(0, 1 << 32), st.integers(2, 25), st.integers(0, 5), st.booleans(), st.booleans())
def test_of_an_edited_program_the_known_mapping_is_found_or_refused(
    seed: int, layers: int, edits: int, contents: bool, digests: bool
) -> None:
    dice = random.Random(seed)
    program = layered(dice, layers, contents=contents)
    changed = edited(program, dice, edits)
    found = align(program.trace(digests=digests), changed.trace(digests=digests))
    assert not wrong_pairs(program, changed, found.partner_of_a.tolist())
    for place, partner in enumerate(found.partner_of_a.tolist()):
        assert partner < 0 or found.partner_of_b[partner] == place


@pytest.fixture
def real(intact: Callable[[str], Path]) -> list[Program]:
    found = []
    for model in ("gpt2_training", "llama", "resnet", "decoder"):
        with open_capture(intact(model)) as reader:
            found.append(program_of(read_trace(reader)))
    return found


@pytest.mark.slow
@EDITS
@given(st.integers(0, 1 << 32), st.integers(0, 3), st.integers(0, 6), st.booleans())
def test_of_an_edited_capture_the_known_mapping_is_found_or_refused(
    real: list[Program], seed: int, which: int, edits: int, digests: bool
) -> None:
    program, dice = real[which], random.Random(seed)
    changed = edited(program, dice, edits)
    found = align(program.trace(digests=digests), changed.trace(digests=digests))
    assert not wrong_pairs(program, changed, found.partner_of_a.tolist())


@pytest.mark.slow
def test_nearly_all_of_an_edited_capture_is_aligned(real: list[Program]) -> None:
    shares = []
    for seed in range(40):
        program, dice = real[seed % len(real)], random.Random(seed)
        changed = edited(program, dice, 3)
        kept = {op.name for op in program.ops} & {op.name for op in changed.ops}
        shares.append(align(program.trace(), changed.trace()).pairs / len(kept))
    assert sorted(shares)[len(shares) // 2] > 0.99 and sum(shares) / len(shares) > 0.9


def chain(count: int, *, last: int = 99) -> Program:
    """One op again and again, and another at the end."""
    ops = [Op(1000 + place, 20, (1 + place,), (2 + place,)) for place in range(count)]
    return Program([*ops, Op(5000, last, (1 + count,), (2 + count,))], {1: (7, 64)})


def test_what_is_before_a_change_is_aligned_by_what_it_computes() -> None:
    found = align(chain(100).trace(), chain(99).trace())
    assert found.partner_of_a[:99].tolist() == list(range(99))
    assert found.partner_of_a[99:].tolist() == [-1, 99]  # the one that is too many, and the end


@pytest.mark.slow
def test_ops_that_one_run_logs_in_every_step_hide_nothing_behind_a_change() -> None:
    """They have no partner, however many there are; 20,000 steps take half a second."""
    scaled, logging = chain(20_000), chain(20_000)
    logging.ops = [
        each
        for place, op in enumerate(logging.ops)
        for each in (op, Op(100_000 + place, 30, op.writes, (100_000 + place,)))
    ]
    for program, key in ((scaled, 11), (logging, 12)):
        program.ops[0] = replace(program.ops[0], key=key, loose=10)
    found = align(scaled.trace(), logging.trace())
    assert found.partner_of_a.tolist() == list(range(0, len(logging.ops), 2)) and not found.doubts


def test_a_composite_op_and_its_parts_are_one_block_with_what_leaves_it() -> None:
    whole = Program(
        [Op(1, 10, (100, 101, 102), (103,)), Op(2, 20, (103,), (104,))], {100: (1, 4), 101: (2, 4), 102: (3, 4)}
    )
    parts = Program(
        [Op(3, 60, (101, 102), (200,)), Op(4, 61, (200, 100), (103,)), Op(2, 20, (103,), (104,))], dict(whole.outside)
    )
    found = align(whole.trace(), parts.trace())
    (block,) = found.blocks
    assert (block.a, block.b) == ((0,), (0, 1))
    assert len(block.outputs) == 1
    assert found.partner_of_a.tolist() == [-1, 2]


def test_where_nothing_is_certain_the_alignment_is_doubtful() -> None:
    one = Program([Op(place, place + 10, (1,), (place + 100,)) for place in range(30)], {1: (0, 64), 2: (0, 64)})
    other = Program([Op(place, place + 500, (1,), (place + 100,)) for place in range(30)], {1: (0, 64)})
    found = align(one.trace(), other.trace())
    assert found.pairs == 0 and found.doubts == [(0, 0)]
