"""Indices, offsets and masks that were not captured: operators do the work they did, which zeros would not have."""

from pathlib import Path

import pytest
import torch

import replayfmt

from .serving import _paged

ROCM = (
    "paged_attention(Tensor(a!) out, Tensor exp_sum, Tensor max_logits, Tensor tmp_out, Tensor query, "
    "Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor context_lens"
    ", int block_size, int max_context_len, Tensor? alibi_slopes, str kv_cache_dtype) -> ()"
)


def result_of(path: Path, program, op: str) -> torch.Tensor:
    """What an op gives in a replay of a program that was captured without content."""
    with replayfmt.capture(path, payload="none", force=True):
        program()
    with replayfmt.open(path) as capture:
        ordinal = next(number for number, each in capture.ops.by_ordinal.items() if each.kernel.name == op)
        result = capture.ops.by_ordinal[ordinal].replay()
    return result[0] if isinstance(result, tuple) else result


def test_an_embedding_reads_many_rows(tmp_path):
    table, ids = torch.randn(1000, 4), torch.zeros(64, dtype=torch.int64)
    assert len(torch.nn.functional.embedding(ids, table).unique(dim=0)) == 1
    rows = result_of(tmp_path / "a.opreplay", lambda: torch.nn.functional.embedding(ids, table), "aten::embedding")
    assert len(rows.unique(dim=0)) > 50


def test_bags_share_the_indices_out(tmp_path):
    table, ids = torch.ones(100, 1), torch.zeros(60, dtype=torch.int64)
    offsets = torch.zeros(6, dtype=torch.int64)

    def program():
        return torch.nn.functional.embedding_bag(ids, table, offsets, mode="sum")

    assert program().flatten().tolist() == [0, 0, 0, 0, 0, 60], "with zeros one bag has it all"
    with replayfmt.capture(tmp_path / "a.opreplay", payload="none"):
        program()
    with replayfmt.Plan(tmp_path / "a.opreplay") as plan:
        filled = {each.argument: each for each in plan.synthesis.initialized}
        assert filled["offsets"].initializer == "offsets"
        held = plan.synthesis.content(filled["offsets"].tensor)
    assert held.diff().tolist() == [10] * 5


@pytest.mark.parametrize("op", ["gather", "index_select", "index"])
def test_reads_by_index_are_spread(tmp_path, op):
    source = torch.randn(500, 3)
    long, wide = torch.zeros(40, dtype=torch.int64), torch.zeros(40, 3, dtype=torch.int64)
    program = {
        "gather": lambda: torch.gather(source, 0, wide),
        "index_select": lambda: source.index_select(0, long),
        "index": lambda: source[long],
    }[op]
    assert len(program().unique(dim=0)) == 1
    assert len(result_of(tmp_path / "a.opreplay", program, f"aten::{op}").unique(dim=0)) > 30


def test_a_mask_selects_as_many_as_it_did(tmp_path):
    source, mask = torch.randn(100), torch.zeros(100, dtype=torch.bool)
    mask[::4] = True
    assert len(result_of(tmp_path / "a.opreplay", lambda: source.masked_select(mask), "aten::masked_select")) == 25


def test_scattered_writes_go_to_different_places(tmp_path):
    target, index, values = torch.zeros(1000), torch.zeros(50, dtype=torch.int64), torch.ones(50)

    def program():
        return target.scatter_add(0, index, values)

    assert int((program() != 0).sum()) == 1
    written = result_of(tmp_path / "a.opreplay", program, "aten::scatter_add")
    with replayfmt.Plan(tmp_path / "a.opreplay") as plan:
        (index_of,) = (each for each in plan.synthesis.initialized if each.argument == "index")
        places = plan.synthesis.content(index_of.tensor)
    assert len(places.unique()) > 45 and written.shape == (1000,)


def test_the_rocm_form_of_paged_attention_reads_whole_contexts(tmp_path):
    from .serving import work

    work.clear()
    query, out = torch.randn(4, 2, 8), torch.zeros(4, 2, 8)
    keys, values = torch.randn(64, 2, 2, 16, 4), torch.randn(64, 2, 8, 16)
    tables, lengths = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    parts = torch.zeros(4, 2, 1)

    def reference(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, *others):
        return _paged(out, query, key_cache, value_cache, *others)

    with torch.library._scoped_library("_rocm_C", "FRAGMENT") as library:
        library.define(ROCM)
        library.impl("paged_attention", reference, "CPU")

        def program():
            torch.ops._rocm_C.paged_attention(
                out, parts, parts, parts, query, keys, values, 2, 0.3, tables, lengths, 16, 256, None, "auto"
            )

        program()
        assert work["tokens_read"] == 0
        with replayfmt.capture(tmp_path / "a.opreplay", payload="none"), replayfmt.scope("step[DECODE bs=4]"):
            program()
        with replayfmt.Plan(tmp_path / "a.opreplay") as plan:
            assert plan.execute().outcome == "ok"
            assert any("decode, 4 sequences" in note for note in plan.notes)
    assert work["longest"] == 256 and work["tokens_read"] >= 4 * 128
    assert work["blocks_read"] >= 4 * 8


def test_labels_that_are_shifted_and_flattened_are_classes(tmp_path):
    tokens, table = torch.zeros(2, 9, dtype=torch.int64), torch.randn(50, 50)

    def program():
        logits = torch.nn.functional.embedding(tokens, table)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    with replayfmt.capture(tmp_path / "a.opreplay", payload="none"):
        program()
    with replayfmt.open(tmp_path / "a.opreplay") as capture:
        assert any(op.kernel.name == "aten::_unsafe_view" for op in capture.ops)
    assert replayfmt.Plan(tmp_path / "a.opreplay").execute(verify="auto").outcome == "ok"
