"""Content for the operators of serving engines: the right work where zeros would be the wrong one.

Each operator is captured without content, replayed with what the built-in initializers make, and counts what it did.
"""

import pytest
import torch

import replayfmt
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.initializers import Initializer, Registry, register, unregister
from replayfmt.initializers.serving.experts import parse_routing

from .serving import engines, replayed

DECODE = "execute_8_context_0(sq0sk0sqsq0sqsk0)_generation_8(sq8sk801sqsq8sqsk801)"
MIXED = "execute_6_context_2(sq20sk50sqsq208sqsk520)_generation_4(sq4sk300sqsq4sqsk300)"


@pytest.fixture
def done():
    with engines() as work:
        yield work


def paged(sequences=8, blocks=64, block=16, row=16, longest=200):
    out, query = torch.zeros(sequences, 2, 8), torch.randn(sequences, 2, 8)
    keys, values = torch.randn(blocks, 2, 2, block, 4), torch.randn(blocks, 2, 8, block)
    tables, lengths = torch.zeros(sequences, row, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32)
    return lambda: torch.ops._C.paged_attention_v1(
        out, query, keys, values, 2, 0.3, tables, lengths, block, longest, None, "auto"
    )


@pytest.mark.slow
def test_paged_attention_reads_the_context_that_the_annotation_says(tmp_path, done):
    program = paged(blocks=80)
    program()
    assert done["tokens_read"] == 0, "zeros are no work at all"
    notes = replayed(tmp_path / "a.opreplay", program, DECODE)
    assert done["tokens_read"] == 801
    assert done["blocks_read"] == sum(-(-length // 16) for length in [101] + [100] * 7)
    assert "decode, 8 sequences, 8 new tokens" in notes and DECODE in notes


@pytest.mark.slow
def test_without_an_annotation_the_heuristic_is_said_and_fits_the_cache(tmp_path, done):
    notes = replayed(tmp_path / "a.opreplay", paged(blocks=1024))
    assert done["longest"] == 200, "the captured maximum is met"
    assert 8 * 100 <= done["tokens_read"] <= 8 * 200
    assert "a guess: 8 new tokens for 8 sequences" in notes
    notes = replayed(tmp_path / "b.opreplay", paged(blocks=8, row=13))
    assert done["blocks_read"] == 8 and done["tokens_read"] <= 8 * 16
    assert "the cache has room for 128 tokens" in notes


def varlen(tokens, sequences, blocks=256, block=16, longest=512):
    q = torch.randn(tokens, 2, 8)
    k, v = torch.randn(blocks, block, 2, 8), torch.randn(blocks, block, 2, 8)
    starts = torch.zeros(sequences + 1, dtype=torch.int32)
    lengths = torch.zeros(sequences, dtype=torch.int32)
    table = torch.zeros(sequences, longest // block, dtype=torch.int32)
    return lambda: torch.ops._vllm_fa2_C.varlen_fwd(q, k, v, starts, lengths, table, tokens, longest)


@pytest.mark.slow
def test_prefill_and_decode_are_split_as_the_annotation_says(tmp_path, done):
    program = varlen(24, 6)
    program()
    assert done["products"] == 0
    notes = replayed(tmp_path / "a.opreplay", program, MIXED)
    assert done["queries"] == 24 and done["decodes"] == 4
    assert done["products"] == 300 + 10 * 50
    assert "mixed, 6 sequences, 24 new tokens" in notes


@pytest.mark.slow
def test_an_annotation_of_another_batch_is_not_believed(tmp_path, done):
    notes = replayed(tmp_path / "a.opreplay", varlen(30, 3), MIXED)
    assert done["queries"] == 30 and "which is not what the annotation" in notes
    assert "prefill, 3 sequences, 30 new tokens" in notes


def test_sequences_that_pad_a_graph_have_no_tokens(tmp_path, done):
    replayed(tmp_path / "a.opreplay", varlen(24, 8), MIXED)
    assert done["queries"] == 24 and done["decodes"] == 4 and done["products"] == 800


@pytest.mark.slow
def test_ragged_page_lists_begin_and_end_where_they_should(tmp_path, done):
    q, cache = torch.randn(4, 2, 8), torch.randn(64, 2, 16, 2, 8)
    starts, pages = torch.zeros(5, dtype=torch.int32), torch.zeros(48, dtype=torch.int32)
    last = torch.zeros(4, dtype=torch.int32)

    def program():
        torch.ops.flashinfer.batch_decode(q, cache, starts, pages, last, 16)

    program()
    assert done["tokens_read"] == 0
    replayed(tmp_path / "a.opreplay", program, "step[DECODE bs=4]")
    assert done["distinct"] == done["pages"] <= 48
    assert done["tokens_read"] > 4 * 16


@pytest.mark.slow
def test_cache_writes_go_to_different_slots(tmp_path, done):
    key, value = torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    keys, values = torch.zeros(16, 4, 2, 8), torch.zeros(16, 4, 2, 8)
    slots = torch.zeros(12, dtype=torch.int64)

    def program():
        torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, keys, values, slots, "auto")

    program()
    assert done["slots"] == 1, "zeros write one slot over and over"
    replayed(tmp_path / "a.opreplay", program)
    assert done["slots"] == done["blocks"] == 12
    key, value, slots = torch.randn(40, 2, 8), torch.randn(40, 2, 8), torch.zeros(40, dtype=torch.int64)
    replayed(tmp_path / "b.opreplay", program)
    assert (done["slots"], done["blocks"]) == (40, 10)


@pytest.mark.slow
def test_positions_are_those_of_the_step(tmp_path, done):
    positions, query, angles = torch.zeros(24, dtype=torch.int64), torch.randn(24, 8), torch.randn(4096, 8)

    def program():
        torch.ops._C.rotary_embedding(positions, query, 8, angles)

    replayed(tmp_path / "a.opreplay", program, MIXED)
    assert done["positions"][:4] == [74, 74, 74, 74], "the last of 75 tokens of context each"
    assert done["positions"][4:14] == list(range(15, 25)) and done["positions"][14:] == list(range(15, 25))
    replayed(tmp_path / "b.opreplay", program)
    assert done["positions"] == list(range(4072, 4096))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["execute", "step[DECODE bs=8]"])
def test_positions_are_those_of_the_contexts_that_attention_reads(tmp_path, done, scope):
    positions, query, angles = torch.zeros(8, dtype=torch.int64), torch.randn(8, 8), torch.randn(4096, 8)
    attention = paged(blocks=512)

    def program():
        torch.ops._C.rotary_embedding(positions, query, 8, angles)
        attention()

    replayed(tmp_path / "a.opreplay", program, scope)
    assert done["longest"] == 200 == max(done["positions"]) + 1
    assert done["tokens_read"] == sum(done["positions"]) + 8


def align(tokens=64, each=4, experts=32):
    ids = torch.zeros(tokens, each, dtype=torch.int32)
    slots, blocks = torch.zeros(1024, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    return lambda: torch.ops._moe_C.moe_align_block_size(
        ids, experts, 16, slots, blocks, torch.zeros(1, dtype=torch.int32)
    )


@pytest.mark.slow
def test_experts_are_different_for_a_token_and_spread_as_the_flag_says(tmp_path, done):
    notes = replayed(tmp_path / "a.opreplay", align())
    uniform = done["busiest"]
    assert done["experts"] > 24 and not done["repeated"] and "64 tokens to 4 of 32 experts each, uniform" in notes
    notes = replayed(tmp_path / "a.opreplay", align(), initializer_options={"moe-routing": "zipf"})
    assert done["busiest"] > 1.5 * uniform and "zipf, exponent 1.2" in notes
    replayed(tmp_path / "a.opreplay", align(), initializer_options={"moe-routing": "zipf:8"})
    assert done["busiest"] == 64, "nearly everything goes to the most popular"


def moe(slots=640, blocks=40, tokens=32):
    given, weights = torch.randn(tokens, 8), torch.randn(8, 4, 8)
    shares = torch.rand(tokens, 2)
    pairs, experts = torch.zeros(slots, dtype=torch.int32), torch.zeros(blocks, dtype=torch.int32)
    valid = torch.zeros(1, dtype=torch.int32)
    return lambda: torch.ops._moe_C.moe_gemm(given, weights, shares, pairs, experts, valid, 2, 16)


def test_sorted_pairs_are_all_there_padded_to_blocks_of_one_expert(tmp_path, done):
    program = moe()
    program()
    assert done["pairs"] == 0
    notes = replayed(tmp_path / "a.opreplay", program)
    assert done["pairs"] == done["distinct"] == 64
    assert done["experts"] == 8
    assert f"of {done['blocks'] * 16} slots are padding to blocks of 16" in notes


def test_weights_of_experts_are_positive_and_add_up_to_1(tmp_path, done):
    replayed(tmp_path / "a.opreplay", moe())
    assert done["least_share"] > 0 and done["shares"] == pytest.approx(1) and done["share_spread"] < 1e-5


def test_a_sorting_that_has_no_place_is_refused_with_what_to_write(tmp_path, done):
    program = moe(slots=32, blocks=2)
    with replayfmt.capture(tmp_path / "a.opreplay", payload="none"):
        program()
    with pytest.raises(ReplayRefused) as refused:
        replayfmt.Plan(tmp_path / "a.opreplay")
    assert any(
        "sorted_token_ids" in finding and "--replay-initializer" in finding for finding in refused.value.findings
    )


def test_jagged_rows_differ_and_add_up(tmp_path):
    values, offsets = torch.randn(100, 4), torch.zeros(11, dtype=torch.int64)
    seen = []
    with torch.library._scoped_library("fbgemm", "FRAGMENT") as library:
        library.define("sum_rows(Tensor values, Tensor offsets) -> Tensor")

        def rows(values, offsets):
            seen.append(offsets.diff().tolist())
            return torch.stack([values[a:b].sum(0) for a, b in zip(offsets[:-1], offsets[1:], strict=True)])

        library.impl("sum_rows", rows, "CPU")
        replayed(tmp_path / "a.opreplay", lambda: torch.ops.fbgemm.sum_rows(values, offsets))
    assert seen[0] == [0] * 10
    assert sum(seen[-1]) == 100 and len(set(seen[-1])) > 2


def test_the_same_plan_twice_makes_the_same_content(tmp_path, done):
    notes = replayed(tmp_path / "a.opreplay", align())
    first = done["counts"]
    with replayfmt.Plan(tmp_path / "a.opreplay") as plan:
        plan.execute()
        assert " | ".join(plan.notes) == notes
    assert done["counts"] == first


def test_an_initializer_of_the_user_comes_first(tmp_path, done):
    @register("_moe_C::moe_align_block_size", argument="topk_ids", name="mine")
    def mine(request):
        ids = torch.arange(request.tensor.elements).reshape(request.tensor.sizes) % 4
        return ids.to(request.tensor.dtype)

    try:
        replayed(tmp_path / "a.opreplay", align())
    finally:
        unregister("mine")
    assert done["experts"] == 4 and done["busiest"] == 64


def mine(operator, argument, values, name="mine"):
    """An initializer as a user writes it."""
    return Initializer(
        name, lambda request: torch.tensor(values, dtype=request.tensor.dtype), op=operator, arguments=(argument,)
    )


@pytest.mark.slow
def test_an_initializer_of_the_user_comes_first_where_a_built_in_one_fills_several_arguments(tmp_path, done):
    lengths = [5, 33, 200, 16, 1, 90, 17, 64]
    notes = replayed(
        tmp_path / "a.opreplay",
        paged(blocks=64),
        DECODE,
        initializers=[mine("_C::paged_attention_v1", "seq_lens", lengths)],
    )
    assert done["tokens_read"] == sum(lengths) and done["longest"] == 200
    assert done["blocks_read"] == sum(-(-length // 16) for length in lengths), "the table lists what the lengths need"
    assert "contexts of 1 to 200 tokens; from the content of seq_lens" in notes
    notes = replayed(
        tmp_path / "b.opreplay",
        varlen(24, 6),
        MIXED,
        initializers=[mine("*varlen*", "cu_seqlens_q", [0, 1, 2, 3, 4, 5, 24])],
    )
    assert done["decodes"] == 5 and done["queries"] == 24 and "mixed, 6 sequences" in notes
    replayed(tmp_path / "c.opreplay", varlen(24, 6), initializers=[mine("*varlen*", "seqused_k", [1, 2, 3, 4, 5, 90])])
    assert done["queries"] == 24 and done["products"] == 1 + 4 + 9 + 16 + 25 + 9 * 90


@pytest.mark.slow
def test_an_initializer_by_role_or_dtype_comes_before_a_joint_built_in_one_too(tmp_path, done):
    made = Initializer(
        "ones",
        lambda request: torch.ones(request.tensor.sizes, dtype=request.tensor.dtype),
        dtypes=frozenset({torch.int32}),
    )
    replayed(tmp_path / "a.opreplay", paged(), DECODE, initializers=[made])
    assert done["tokens_read"] == 8 and done["blocks_read"] == 1


def test_lengths_of_the_user_that_the_call_has_no_place_for_are_refused(tmp_path, done):
    with pytest.raises(ReplayRefused) as refused:
        replayed(tmp_path / "a.opreplay", paged(), initializers=[mine("*", "seq_lens", [9999] * 8)])
    assert any("seq_lens says 8 lengths from 9999 to 9999" in finding for finding in refused.value.findings)


def test_experts_of_the_user_are_kept_and_the_pairs_are_said_not_to_be_sorted_by_them(tmp_path, done):
    notes = replayed(tmp_path / "a.opreplay", moe(), initializers=[mine("*", "expert_ids", [3] * 40)])
    assert done["experts"] == 1 and done["pairs"] == done["distinct"] == 64
    assert "the content of expert_ids comes from elsewhere" in notes


@pytest.mark.slow
def test_an_initializer_of_the_user_that_fills_nothing_is_named(tmp_path, done):
    notes = replayed(
        tmp_path / "a.opreplay",
        moe(),
        initializers=[mine("*", "expert_id", [3] * 40), mine("*", "expert_ids", [3] * 40, "other")],
    )
    assert "initializer mine, for *(expert_id), filled nothing" in notes and "initializer other" not in notes
    with replayfmt.capture(tmp_path / "b.opreplay"):
        torch.ones(2).exp()
    with replayfmt.Plan(tmp_path / "b.opreplay", initializers=[mine("aten::exp", "self", [1.0])]) as plan:
        assert "initializer mine, for aten::exp(self), filled nothing" in " | ".join(plan.notes)


@pytest.mark.parametrize("text", ["", "zip", "zipf:", "zipf:x", "zipf:-1", "uniform:2"])
def test_a_wrong_routing_is_wrong_usage(text):
    with pytest.raises(UsageError, match="--moe-routing"):
        parse_routing(text)
    with pytest.raises(UsageError, match="--moe-routing"):
        Registry(options={"moe-routing": text})


def test_an_unknown_option_is_wrong_usage():
    with pytest.raises(UsageError, match="there is only 'moe-routing'"):
        Registry(options={"routing": "uniform"})
