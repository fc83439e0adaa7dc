"""What serving engines say of a step in its annotation."""

from __future__ import annotations

import pytest

from replayfmt.pytorch.traced_names import Requests, iteration_in, parse_iteration

from .conftest import Import
from .traces import MM, annotation, op

DETAILED = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)"


def test_vllms_detailed_form_gives_requests_and_tokens_of_both_phases() -> None:
    found = parse_iteration(DETAILED)
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


@pytest.mark.parametrize(
    ("name", "phase", "prefill", "decode"),
    [
        ("step[DECODE bs=32]", "decode", Requests(0, 0), Requests(32, 32)),
        ("step[EXTEND bs=2 toks=107]", "prefill", Requests(2, 107), Requests(0, 0)),
        ("step[MIXED bs=2]", "mixed", Requests(), Requests()),
        (
            "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]",
            "decode",
            Requests(0, 0),
            Requests(64, 128, 131072, 256, 262144),
        ),
        (
            "step[EXTEND bs=2 toks=14721 c_sq=14721 c_sqsq=108745533 c_sqsk=108745533 c_sk=14721]",
            "prefill",
            Requests(2, 14721, 14721, 108745533, 108745533),
            Requests(0, 0),
        ),
        (
            "step[MIXED bs=2 c=1 g=1 c_sq=5 c_sk=8 c_sqsq=25 c_sqsk=40 g_sq=1 g_sk=12 g_sqsq=1 g_sqsk=12]",
            "mixed",
            Requests(1, 5, 8, 25, 40),
            Requests(1, 1, 12, 1, 12),
        ),
    ],
)
def test_sglangs_steps(name: str, phase: str, prefill: Requests, decode: Requests) -> None:
    found = parse_iteration(name)
    assert found is not None and (found.engine, found.phase) == ("sglang", phase)
    assert (found.prefill, found.decode) == (prefill, decode) and found.text == name


@pytest.mark.parametrize(
    ("name", "phase", "prefill", "decode"),
    [
        ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", "prefill", Requests(2, 14721, 14721), Requests(0, 0)),
        ("prefill[bs=1 tok=8192 ctx=9000]", "prefill", Requests(1, 8192, 9000), Requests(0, 0)),
        ("prefill[bs=6 tok=17408 ctx=[4096, 4096, 4096]...+3]", "prefill", Requests(6, 17408), Requests(0, 0)),
        (
            "prefill[bs=2 tok=14721 ctx=[7803, 6918] sqsq=108745533 sqsk=118745533 sk=15000]",
            "prefill",
            Requests(2, 14721, 15000, 108745533, 118745533),
            Requests(0, 0),
        ),
        ("prefill[bs=2 tok=16384]", "prefill", Requests(2, 16384), Requests(0, 0)),
        ("decode[bs=64 tok=64 d=64]", "decode", Requests(0, 0), Requests(64, 64)),
        ("decode[bs=117/128 tok=117 d=117]", "decode", Requests(0, 0), Requests(117, 117)),
        (
            "decode[bs=32 tok=128 d=32 spec=3 sqsq=512 sqsk=262144 sk=65536]",
            "decode",
            Requests(0, 0),
            Requests(32, 128, 65536, 512, 262144),
        ),
        (
            "decode[bs=128 tok=384 p=2 d=126 sqsq=132612 sqsk=1114112 sk=258048 tbo=1]",
            "mixed",
            Requests(2, 258),
            Requests(126, 126),
        ),
        ("decode[bs=3 tok=3 p=2 d=1 spec=3]", "mixed", Requests(2), Requests(1)),
    ],
)
def test_atoms_steps(name: str, phase: str, prefill: Requests, decode: Requests) -> None:
    found = parse_iteration(name)
    assert found is not None and (found.engine, found.phase) == ("atom", phase)
    assert (found.prefill, found.decode) == (prefill, decode) and found.text == name


def test_a_second_number_of_vllms_short_form_is_not_taken_for_another_one() -> None:
    found = parse_iteration("execute_context_1(888_788544)_generation_0(0)")
    assert found is not None and (found.prefill, found.decode) == (Requests(1, 888), Requests(0, 0))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("execute/decode[bs=117/128 tok=117 d=117]/layer 3", "decode[bs=117/128 tok=117 d=117]"),
        (f"ProfilerStep#1/{DETAILED}/step[DECODE bs=32]", DETAILED),
        (f"step[DECODE bs=32]/{DETAILED}", "step[DECODE bs=32]"),
    ],
)
def test_the_outermost_scope_that_describes_a_batch_counts(path: str, text: str) -> None:
    found = iteration_in(path)
    assert found is not None and found.text == text
    assert iteration_in("execute/step 3") is None and iteration_in("") is None


def test_a_step_is_described_once_in_an_import(imported: Import) -> None:
    events = [
        annotation(DETAILED, 0, 1000),
        annotation("step[DECODE bs=32]", 10, 900),
        annotation("prefill[bs=2 tok=14]", 20, 100),
        op("aten::mm", 30, 20, MM),
        annotation("after", 2000, 100),
        annotation("step[DECODE bs=31]", 2010, 80),
        op("aten::mm", 2020, 20, MM),
    ]
    told = {
        record.argument("name"): (record.annotation or {}).get("iteration")
        for record in imported(events).of("scope_begin")
    }
    assert told[DETAILED]["decode"]["key_tokens"] == 55086 and told["step[DECODE bs=31]"]["decode"]["requests"] == 31
    assert told["step[DECODE bs=32]"] is told["prefill[bs=2 tok=14]"] is told["after"] is None


@pytest.mark.parametrize(
    "name",
    [
        "ProfilerStep#3",
        "decode[]",
        "decode[tok=3]",
        "prefill[bs=x]",
        "draft[1/3 bs=4]",
        "execute",
        "step",
        "step[WALK bs=2]",
        "execute_x_context_y(z)",
        "",
        f"execute_new_{'9' * 5000}_cached_1",
        f"step[DECODE bs={'9' * 20}]",
    ],
)
def test_other_annotations_are_no_steps(name: str) -> None:
    assert parse_iteration(name) is None
