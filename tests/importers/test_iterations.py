"""What serving engines say of a step in its annotation."""

from __future__ import annotations

import pytest

from replayfmt.pytorch.iterations import Requests, parse_iteration


def test_vllms_detailed_form_gives_requests_and_tokens_of_both_phases() -> None:
    found = parse_iteration("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)")
    assert found is not None and found.engine == "vllm" and found.phase == "decode"
    assert found.prefill == Requests(0, 0, 0, 0, 0)
    assert found.decode == Requests(32, 32, 55086, 32, 55086)
    assert found.row()["decode"]["key_tokens"] == 55086


def test_mixed_and_prefill_steps_are_told_apart() -> None:
    mixed = parse_iteration("execute_5_context_3(sq128sk256sqsq1sqsk1)_generation_2(sq2sk300sqsq2sqsk300)")
    assert mixed is not None and mixed.phase == "mixed" and mixed.prefill.query_tokens == 128
    prefill = parse_iteration("execute_1_context_3(sq128sk256)")
    assert prefill is not None and prefill.phase == "prefill" and prefill.decode.requests == 0


def test_vllms_older_forms_give_what_they_say() -> None:
    found = parse_iteration("execute_context_3(512)_generation_2(50)")
    assert found is not None and found.phase == "mixed"
    assert found.prefill == Requests(3, 512) and found.decode == Requests(2, 50)
    oldest = parse_iteration("execute_new_1_cached_31")
    assert oldest is not None and oldest.phase == "mixed" and oldest.decode == Requests(31)


@pytest.mark.parametrize(("name", "phase", "prefill", "decode"), [
    ("step[DECODE bs=32]", "decode", Requests(0, 0), Requests(32, 32)),
    ("step[EXTEND bs=2 toks=107]", "prefill", Requests(2, 107), Requests(0, 0)),
    ("step[MIXED bs=2]", "mixed", Requests(), Requests()),
])
def test_sglangs_steps(name: str, phase: str, prefill: Requests, decode: Requests) -> None:
    found = parse_iteration(name)
    assert found is not None and (found.engine, found.phase) == ("sglang", phase)
    assert (found.prefill, found.decode) == (prefill, decode) and found.text == name


@pytest.mark.parametrize("name", ["ProfilerStep#3", "execute", "step", "step[WALK bs=2]", "execute_x_context_y(z)", "",
                                  f"execute_new_{'9' * 5000}_cached_1", f"step[DECODE bs={'9' * 20}]"])
def test_other_annotations_are_no_steps(name: str) -> None:
    assert parse_iteration(name) is None
