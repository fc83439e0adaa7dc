"""Reference operators of serving engines, on the CPU, that really depend on what their integers say.

Each counts the work it did: what a kernel reads and computes with these values. Registered under the engines' own names
while a test runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import replayfmt

work: dict[str, float] = {}

PAGED = (
    "paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, "
    "float scale, Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, "
    "str kv_cache_dtype) -> ()"
)
VARLEN = (
    "varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor seqused_k, Tensor block_table, "
    "int max_seqlen_q, int max_seqlen_k) -> Tensor"
)
FLASHINFER = (
    "batch_decode(Tensor q, Tensor paged_kv_cache, Tensor kv_indptr, Tensor kv_indices, "
    "Tensor kv_last_page_len, int page_size) -> Tensor"
)
RESHAPE = (
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype) -> ()"
)
ROTARY = "rotary_embedding(Tensor positions, Tensor(a!) query, int head_size, Tensor cos_sin_cache) -> ()"
ALIGN = (
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_token_ids, "
    "Tensor(b!) experts_ids, Tensor(c!) num_tokens_post_pad) -> ()"
)
MOE_GEMM = (
    "moe_gemm(Tensor A, Tensor B, Tensor topk_weights, Tensor sorted_token_ids, Tensor expert_ids, "
    "Tensor num_tokens_post_pad, int top_k, int block_size) -> Tensor"
)


def _paged(
    out,
    query,
    key_cache,
    value_cache,
    num_kv_heads,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
    alibi_slopes,
    kv_cache_dtype,
):
    """key_cache: (blocks, heads, size / x, block, x); value_cache: (blocks, heads, size, block)."""
    read, distinct = 0, set()
    for row, length in enumerate(seq_lens.tolist()):
        assert 0 <= length <= max_seq_len
        blocks = block_tables[row, : -(-length // block_size)]
        distinct.update(blocks.tolist())
        read += length
        if not length:
            out[row].zero_()
            continue
        keys = key_cache[blocks].permute(0, 3, 1, 2, 4).reshape(-1, num_kv_heads, query.shape[-1])[:length]
        values = value_cache[blocks].permute(0, 3, 1, 2).reshape(-1, num_kv_heads, query.shape[-1])[:length]
        weights = torch.softmax(torch.einsum("hd,lhd->hl", query[row], keys) * scale, -1)
        out[row] = torch.einsum("hl,lhd->hd", weights, values)
    work.update(tokens_read=read, blocks_read=len(distinct), longest=int(seq_lens.max()))


def _varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k):
    """k, v: (blocks, block, heads, size)."""
    out = torch.zeros_like(q)
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    products = 0
    assert starts[0] == 0 and starts[-1] <= len(q)
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        assert 0 <= end - begin <= max_seqlen_q and end - begin <= length <= max_seqlen_k
        products += (end - begin) * length
        if end == begin:
            continue
        blocks = block_table[row, : -(-length // k.shape[1])]
        keys, values = k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length]
        weights = torch.softmax(torch.einsum("qhd,lhd->hql", q[begin:end], keys), -1)
        out[begin:end] = torch.einsum("hql,lhd->qhd", weights, values)
    work.update(products=products, queries=starts[-1], decodes=cu_seqlens_q.diff().tolist().count(1))
    return out


def _batch_decode(q, paged_kv_cache, kv_indptr, kv_indices, kv_last_page_len, page_size):
    """paged_kv_cache: (pages, 2, page, heads, size)."""
    starts, last = kv_indptr.tolist(), kv_last_page_len.tolist()
    out, read, pages_read = torch.zeros_like(q), 0, []
    for row in range(len(q)):
        pages = kv_indices[starts[row] : starts[row + 1]]
        assert 0 <= last[row] <= page_size
        length = (len(pages) - 1) * page_size + last[row] if len(pages) else 0
        read += length
        pages_read += pages.tolist()
        if length:
            keys, values = (paged_kv_cache[pages, which].flatten(0, 1)[:length] for which in (0, 1))
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q[row], keys), -1)
            out[row] = torch.einsum("hl,lhd->hd", weights, values)
    work.update(tokens_read=read, pages=len(pages_read), distinct=len(set(pages_read)))
    return out


def _reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype):
    block = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block, slot % block] = key[token]
        value_cache[slot // block, slot % block] = value[token]
    work.update(slots=len(set(slot_mapping.tolist())), blocks=len({slot // block for slot in slot_mapping.tolist()}))


def _rotary(positions, query, head_size, cos_sin_cache):
    query.mul_(cos_sin_cache[positions][:, :1])
    work.update(positions=positions.tolist())


def _align(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad):
    counts = torch.bincount(topk_ids.flatten(), minlength=num_experts)
    assert len(counts) == num_experts
    num_tokens_post_pad.fill_(int((-(-counts // block_size)).sum()) * block_size)
    sorted_token_ids.fill_(topk_ids.numel())
    experts_ids.zero_()
    work.update(repeated=sum(len(set(row)) < len(row) for row in topk_ids.tolist()))
    work.update(experts=int((counts > 0).sum()), busiest=int(counts.max()), counts=sorted(counts.tolist()))


def _moe_gemm(A, B, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_pad, top_k, block_size):
    """A: (tokens, width), B: (experts, out, width)."""
    out = torch.zeros(A.shape[0] * top_k, B.shape[1])
    valid, pairs, used = int(num_tokens_post_pad[0]), [], set()
    assert valid % block_size == 0
    for number in range(valid // block_size):
        expert = int(expert_ids[number])
        for pair in sorted_token_ids[number * block_size : (number + 1) * block_size].tolist():
            if pair < len(out):
                out[pair] = B[expert] @ A[pair // top_k]
                pairs.append(pair)
                used.add(expert)
    sums = topk_weights.sum(-1)
    work.update(
        least_share=float(topk_weights.min()), shares=float(sums.mean()), share_spread=float(sums.max() - sums.min())
    )
    work.update(pairs=len(pairs), distinct=len(set(pairs)), experts=len(used), blocks=valid // block_size)
    return out


@contextmanager
def engines() -> Iterator[dict[str, float]]:
    """Register the operators; gives what the last call of each did."""
    work.clear()
    with (
        torch.library._scoped_library("_C", "FRAGMENT") as vllm,
        torch.library._scoped_library("_C_cache_ops", "FRAGMENT") as caches,
        torch.library._scoped_library("_moe_C", "FRAGMENT") as moe,
        torch.library._scoped_library("_vllm_fa2_C", "FRAGMENT") as flash,
        torch.library._scoped_library("flashinfer", "FRAGMENT") as flashinfer,
    ):
        for library, schema, function in (
            (vllm, PAGED, _paged),
            (vllm, ROTARY, _rotary),
            (caches, RESHAPE, _reshape_and_cache),
            (moe, ALIGN, _align),
            (moe, MOE_GEMM, _moe_gemm),
            (flash, VARLEN, _varlen),
            (flashinfer, FLASHINFER, _batch_decode),
        ):
            library.define(schema)
            library.impl(schema.partition("(")[0], function, "CPU")
        yield work


def replayed(path: Path, program, scope: str = "execute", **options):
    """Capture a program without content and replay it; the notes of the plan."""
    with replayfmt.capture(path, payload="none", force=True), replayfmt.scope(scope):
        program()
    with replayfmt.Plan(path, **options) as plan:
        result = plan.execute()
        assert result.outcome == "ok"
        return " | ".join(plan.notes)
