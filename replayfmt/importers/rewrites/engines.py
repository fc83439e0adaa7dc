"""Operators of serving engines (vLLM, SGLang, FlashInfer, AITER) as compositions of PyTorch's, without the engine.

Each composition has the shapes and dtypes of the original and computes what that is defined as. Lengths of sequences
are content, which no trace has: attention reads as many keys as the longest sequence may have, and masks those beyond a
sequence's end. Where the caches are no arguments (vLLM's own attention), the annotation of the engine's step says how
many keys there are. Attention with slopes stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

from .engine_adapters import TABLE as ADAPTERS
from .engine_attention import (
    attention_of_a_step,
    cache_of_a_step,
    decode_of_listed_pages,
    flash,
    latent_attention,
    latent_attention_of_a_step,
    listed_pages,
    merged_states,
    paged_attention,
    prefill,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from .engine_experts import (
    expert_stage,
    experts,
    grouped_product,
    grouped_topk,
    moe_align,
    moe_sum,
    permuted,
    shuffled_rows,
    topk,
    unpermuted,
)
from .engine_layers import (
    activation,
    alone,
    dynamic_quant,
    fused_add_norm,
    fused_add_norm_static_quant,
    group_quant,
    norm_and_rotary,
    norm_block_quant,
    norm_dynamic_quant,
    norm_of_sum,
    norm_static_quant,
    norm_with_add,
    product,
    relu_gated,
    relu_squared,
    rms_norm,
    rope,
    rope_by_positions,
    rotary,
    silu_quant,
    static_quant,
    swiglu,
    tensor_quant,
)
from .engine_sparse import TABLE as SPARSE
from .engine_sparse import chosen_attention, concat_and_cache, latent_decode
from .engine_states import TABLE as STATES
from .engine_weights import TABLE as WEIGHTS
from .rewriting import renamed

# --------------------------------------------------------------------------------------------------------------- tables

_Q_S = ("output_q", "output_s")
_CACHES = "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
_CACHING = (
    f'({_CACHES}str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None, bool interleaved_v=False) -> ()'
)
_DECODING = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, "
    "Tensor seq_lens, "
)
_DECODED = (
    'int block_size, int max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype="auto", Tensor? k_scale=None, '
    "Tensor? v_scale=None, "
)
_SPARSE = (
    "int tp_rank=0, int blocksparse_local_blocks=0, int blocksparse_vert_stride=0, int blocksparse_block_size=64, "
    "int blocksparse_head_sliding_step=0) -> ()"
)
_PARTIAL = "(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, "
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!)? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, "
    "float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, Generator? gen=None) -> Tensor[]"
)
_FLASH3, _CHUNKED = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? softmax_scale, bool is_causal, int window_size_left=-1, int window_size_right=-1, "
    f"{chunk}float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    f"bool? pack_gqa=None, int sm_margin=0, Tensor? {sinks}=None, int cp_world_size=1, int cp_rank=0, "
    "Tensor? cp_tot_seqused_k=None) -> Tensor[]"
    for chunk, sinks in (("", "sinks"), ("int attention_chunk=0, ", "s_aux"))
)
_AITER_NAMES = {"dropout_p": "p_dropout", "logits_soft_cap": "softcap"}
_AITER_LIMITS = (
    "int max_seqlen_q, int max_seqlen_k, {}float dropout_p, float softmax_scale, float logits_soft_cap, "
    "bool zero_tensors, bool is_causal, int window_size_left, int window_size_right, {}bool return_softmax_lse, "
    "bool return_dropout_randval, "
)
_AITER_OUT = "Tensor(a!)? out=None, {}Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? q_descale=None, "
_AITER_OUT += "Tensor? k_descale=None, Tensor? v_descale=None, "
_AITER_TABLE, _AITER_RESULTS = "Tensor? block_table=None, ", "-> (Tensor, Tensor, Tensor, Tensor)"
_AITER_PADDED = "Generator? gen=None, Tensor? cu_seqlens_q_padded=None, Tensor? cu_seqlens_k_padded=None"
_AITER_PACKED = "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, "
_STEP = (
    '(Tensor query, Tensor key, Tensor value, {}str layer_name="", Tensor? output_scale=None, '
    "Tensor? output_block_scale=None, Tensor? kv_cache_dummy_dep=None) -> {}"
)
_NORM = "Tensor input, Tensor weight, float"
_ADD_NORM = "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float"
_OUT_IN = "(Tensor(a!) out, Tensor input"
_RESULT_IN = "(Tensor(a!) result, Tensor input"
_ADDED = "(Tensor(a!) out, Tensor input, Tensor residual_in, Tensor(b!) residual_out, "
_SENSITIVE = "int use_model_sensitive_rmsnorm=0"
_GROUPS = (
    "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size, float eps, float fp8_min, "
    "float fp8_max, bool scale_ue8m0=False"
)
_ROUTES = "(Tensor(a!) topk_weights, Tensor(b!) topk_indices, "
_ROUTED = "Tensor gating_output, bool renormalize=False, "
_ALIGN = (
    "(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_token_ids, Tensor(b!) experts_ids, "
    "Tensor(c!) num_tokens_post_pad"
)
_PERMUTE = (
    "(Tensor input, Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert, "
    "int n_local_expert, int topk, "
)
_PERMUTED = "Tensor(b!) expert_first_token_offset, Tensor(c!) inv_permuted_idx, Tensor(d!) permuted_idx"
_CUMSUM = ", Tensor? cumsum_buffer=None, bool pad_sorted_token_ids=False) -> ()"
_SCALED = "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype"
_HIDDEN = "(Tensor(a!) hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
_QUANTS = "bool use_fp8_w8a8=False, bool use_int8_w8a8=False, bool use_int8_w8a16=False, bool use_int4_w4a16=False, "
_SCALES = "Tensor? w1_scale=None, Tensor? w2_scale=None, "
_POINTS = "Tensor? w1_zp=None, Tensor? w2_zp=None, "
_MORE = "Tensor? a1_scale=None, Tensor? a2_scale=None, int[]? block_shape=None"
_BIASES = ", Tensor? w1_bias=None, Tensor? w2_bias=None"
_GLOBAL = "bool per_channel_quant=False, int global_num_experts=-1, Tensor? expert_map=None, "
_SILU = 'str activation="silu", '
_EARLY = "bool apply_router_weight_on_input=False, "
# Of the versions of vLLM and of SGLang: the arguments behind the five that all have.
_VLLM_EXPERTS = (
    f"{_SILU}{_EARLY}{_QUANTS}{_GLOBAL}{_SCALES}{_POINTS}{_MORE}{_BIASES}",
    f"{_SILU}{_EARLY}{_QUANTS}str? ocp_mx_scheme=None, {_GLOBAL}{_SCALES}{_POINTS}{_MORE}{_BIASES}",
    f"{_SILU}{_QUANTS}str? ocp_mx_scheme=None, {_GLOBAL}{_SCALES}{_POINTS}{_MORE}{_BIASES}",
    f"{_SILU}{_QUANTS.replace('bool use_int8_w8a8=False, ', '')}int global_num_experts=-1, Tensor? expert_map=None, "
    f"{_SCALES}{_POINTS}{_MORE}",
)
_COMBINE = ", bool no_combine=False"
_FACTOR = ", float? routed_scaling_factor=None"
_LIMIT = ", float? gemm1_alpha=None, float? gemm1_limit=None"
_SGLANG_EXPERTS = tuple(
    f"{begin}{_EARLY}{_QUANTS}bool per_channel_quant=False, {_SCALES}{_POINTS}{_MORE}{{}}{_FACTOR}{end}"
    for begin, end in (
        (_SILU, ""),
        (f"Tensor? w1_bias=None, Tensor? w2_bias=None, {_SILU}", _LIMIT),
        (
            "Tensor? w1_bias=None, Tensor? w2_bias=None, int activation=0, bool is_gated=True, ",
            f"{_LIMIT}, bool filter_expert=True",
        ),
    )
)
_AITER_EXPERTS = (
    "(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_mask=None, "
    f"int activation=0, int quant_type=0, bool apply_router_weight_on_input=False, {_SCALES}Tensor? a1_scale=None, "
    "Tensor? a2_scale=None, "
)
_DTYPE = "ScalarType? dtype=None"
_WEIGHTED = "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, "
_SKINNY = "(Tensor in_a, Tensor in_b, "
_ROPE = "int rotate_style, bool reuse_freqs_front_part, bool nope_first) -> ()"
_CHOSEN = "(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v"
_LATENT_STEP = "(Tensor q, Tensor kv_c_normed, Tensor k_pe, "
_ONE, _TWO = (
    "(Tensor(a!) output, Tensor input, ",
    "(Tensor(a!) output_x, Tensor(b!) output_y, Tensor input_x, Tensor input_y, ",
)
_SORTED = (
    "Tensor w1, Tensor w2, Tensor sorted_token_ids, Tensor sorted_expert_ids, Tensor num_valid_ids, Tensor(a!) out, "
)
_LATENT = "Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, Tensor seq_lens, Tensor page_table, "
_LATENT_NAMES = {"kv_c_and_k_pe_cache": "cache", "sm_scale": "scale", "softmax_scale": "scale", "kv_cache": "cache"}
_LATENT_NAMES |= {"kcache": "cache", "k_cache": "cache", "seqlens_k": "seq_lens", "block_table": "page_table"}
_PLANNED = (
    "int head_size_v, Tensor seqlens_k, Tensor block_table, float softmax_scale, bool is_causal, "
    "Tensor tile_scheduler_metadata, Tensor num_splits"
)
_FLASHINFER_NAMES = {"q": "query", "paged_k_cache": "key_cache", "paged_v_cache": "value_cache", "o": "out"}
_FLASHINFER_NAMES |= {"paged_kv_indptr": "kv_indptr", "paged_kv_indices": "kv_page_indices", "sm_scale": "scale"}
_FLASHINFER_NAMES |= {"paged_kv_last_page_len": "kv_last_page_lens", "maybe_lse": "lse", "alibi_slopes": "unused"}
_PREFILL_NAMES = {"paged_k_cache": "k", "paged_v_cache": "v", "o": "out", "qo_indptr": "cu_seqlens_q"}
_PREFILL_NAMES |= {"paged_kv_indptr": "kv_indptr", "paged_kv_indices": "kv_page_indices", "maybe_lse": "lse"}
_PREFILL_NAMES |= {"paged_kv_last_page_len": "kv_last_page_lens", "sm_scale": "softmax_scale"}
_PREFILL_NAMES |= {"window_left": "window_size_left", "logits_soft_cap": "softcap"}
_PREFILL_NAMES |= {"scale_k": "k_descale", "scale_v": "v_descale"}
_SPACES = "(Tensor(a!) float_workspace_buffer, Tensor(b!) int_workspace_buffer, int[] plan_info_vec, Tensor q, "
_MASKED = "Tensor(c!) o, Tensor(d!)? maybe_lse, int mask_mode, int layout, int window_left, "
_CUSTOM = "Tensor? maybe_custom_mask, Tensor? maybe_mask_indptr, Tensor? maybe_alibi_slopes, "
_ITEMS = "Tensor? maybe_prefix_len_ptr, Tensor? maybe_token_pos_in_items_ptr, Tensor? maybe_max_item_len_ptr, "
_CAPPED, _TURNED = "float logits_soft_cap, float sm_scale, ", "float rope_scale, float rope_theta"
_QKV_SCALES = "Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, "
_TABLES = (
    "int? num_qo_heads=None, int? num_kv_heads=None, Tensor? block_tables=None, Tensor? kv_lens_buffer=None, "
    "int? page_size=None, "
)
_ITEMIZED = f"{_MASKED}bool enable_pdl, {_CUSTOM}{_ITEMS}{_CAPPED}"
_PAGED = f"{_SPACES}Tensor paged_k_cache, Tensor paged_v_cache, Tensor qo_indptr, Tensor paged_kv_indptr, "
_PAGED += "Tensor paged_kv_indices, Tensor paged_kv_last_page_len, "
_RAGGED = f"{_SPACES}Tensor k, Tensor v, Tensor qo_indptr, Tensor kv_indptr, "
_SINGLE = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) tmp, Tensor(b!) o, Tensor(c!)? maybe_lse, int mask_mode, int layout, "
)
_SINGLE += f"int window_left, Tensor? maybe_packed_custom_mask, Tensor? maybe_alibi_slopes, {_CAPPED}"
# FlashInfer names an operator after what it is compiled for: dtypes, widths, and embeddings of positions, here none.
_COMPILED = re.compile(
    r"flashinfer::(batch_decode|batch_prefill|single_prefill)_with_kv_cache_\w*posenc_0_\w*?(_ragged|_paged|)_run\Z"
)

_MERGED = {"v_a": "prefix_output", "s_a": "prefix_lse", "v_b": "suffix_output", "s_b": "suffix_lse"}
_MERGED |= {"v_merged": "output", "s_merged": "output_lse"}
_GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "silu_and_mul": ("silu", {}),
    "gelu_and_mul": ("gelu", {}),
    "gelu_tanh_and_mul": ("gelu", {"approximate": "tanh"}),
}
_GROUPED = {"input": "gates", "gating_output": "gates", "scores": "gates", "correction_bias": "bias"}
_GROUPED |= {"num_expert_group": "groups", "n_group": "groups", "topk_grp": "topk_group"}
_GROUPED |= {"need_renorm": "renormalize", "n_share_experts_fusion": "num_fused_shared_experts"}
# By operator: its rule, and its schemas without the name, one for each order of arguments that versions have.
_TABLE: dict[str, tuple[Any, ...]] = {
    "_C::rms_norm": (rms_norm(), "(Tensor(a!) result, Tensor input, Tensor? weight, float epsilon) -> ()"),
    "_C::rms_norm_weightless": (rms_norm(), f"{_RESULT_IN}, float epsilon) -> ()"),
    **{
        f"_C::fused_add_rms_norm{name}": (fused_add_norm(), f"(Tensor(a!) input, Tensor(b!) residual, {weight}) -> ()")
        for name, weight in (("", "Tensor? weight, float epsilon"), ("_weightless", "float epsilon"))
    },
    "_C::rms_norm_per_block_quant": (
        norm_block_quant,
        f"{_RESULT_IN}, Tensor weight, Tensor(b!) scale, float epsilon, Tensor? scale_ub, Tensor(c!)? residual, "
        "int group_size, bool is_scale_transposed) -> ()",
    ),
    "_C::rms_norm_static_fp8_quant": (
        norm_static_quant,
        f"{_RESULT_IN}, Tensor weight, Tensor scale, float epsilon) -> ()",
    ),
    "_C::fused_add_rms_norm_static_fp8_quant": (
        fused_add_norm_static_quant,
        f"{_RESULT_IN}, Tensor(b!) residual, Tensor weight, Tensor scale, float epsilon) -> ()",
    ),
    "_C::rms_norm_dynamic_per_token_quant": (
        norm_dynamic_quant(),
        f"{_RESULT_IN}, Tensor weight, Tensor(b!) scale, float epsilon, Tensor? scale_ub=None, "
        "Tensor(c!)? residual=None) -> ()",
    ),
    "_C::static_scaled_fp8_quant": (static_quant(), f"{_RESULT_IN}, Tensor scale, int[]? group_shape=None) -> ()"),
    "_C::static_scaled_int8_quant": (static_quant(), f"{_RESULT_IN}, Tensor scale, Tensor? azp=None) -> ()"),
    "_C::dynamic_scaled_fp8_quant": (dynamic_quant(by_token=False), f"{_RESULT_IN}, Tensor(b!) scale) -> ()"),
    "_C::dynamic_per_token_scaled_fp8_quant": (
        dynamic_quant(by_token=True),
        f"{_RESULT_IN}, Tensor(b!) scale, Tensor? scale_ub=None) -> ()",
    ),
    "_C::dynamic_scaled_int8_quant": (
        dynamic_quant(by_token=True),
        f"{_RESULT_IN}, Tensor(b!) scale, Tensor(c!)? azp=None) -> ()",
    ),
    "_C::per_token_group_fp8_quant": (
        group_quant,
        f"{_GROUPS}, bool dummy_is_scale_transposed=False, bool dummy_is_tma_aligned=False) -> ()",
    ),
    "_C::per_token_group_quant_int8": (group_quant, f"{_GROUPS.removesuffix(', bool scale_ue8m0=False')}) -> ()"),
    "_C::silu_and_mul_per_block_quant": (
        renamed(group_quant, {"out": "output_q", "scales": "output_s"}, fuse_silu_and_mul=True),
        f"{_OUT_IN}, Tensor(b!) scales, int group_size, Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
    ),
    "_C::cutlass_scaled_mm": (
        product("a", "b", "a_scales", "b_scales", "out"),
        "(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias=None) -> ()",
    ),
    "_C::silu_and_mul_with_clamp": (swiglu(), f"{_OUT_IN}, float limit, float alpha=1.0, float beta=0.0) -> ()"),
    "_C::fatrelu_and_mul": (relu_gated, f"{_OUT_IN}, float threshold) -> ()"),
    "_C::relu_squared": (relu_squared, f"{_OUT_IN}) -> ()"),
    "_C::mul_and_silu": (activation("out", "silu", last=True), f"{_OUT_IN}) -> ()"),
    "_C::gelu_new": (alone(approximate="tanh"), f"{_OUT_IN}) -> ()"),
    "_C::gelu_fast": (alone(approximate="tanh"), f"{_OUT_IN}) -> ()"),
    "_C::gelu_quick": (alone(), f"{_OUT_IN}) -> ()"),
    "sgl_kernel::gelu_quick": (alone(), f"{_OUT_IN}) -> ()"),
    "_C::swigluoai_and_mul": (swiglu(pairs=True), f"{_OUT_IN}, float alpha=1.702, float limit=7.0) -> ()"),
    "_C::silu_and_mul_quant": (silu_quant, f"{_RESULT_IN}, Tensor scale) -> ()"),
    "_C::fused_qk_norm_rope": (
        norm_and_rotary,
        "(Tensor(a!) qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
        "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids) -> ()",
    ),
    "_C_cache_ops::concat_and_cache_mla": (
        concat_and_cache,
        "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
        'str kv_cache_dtype="auto", Tensor? scale=None, bool skip_scale=False) -> ()',
    ),
    "vllm::unified_kv_cache_update": (cache_of_a_step, '(Tensor key, Tensor value, str layer_name="") -> Tensor'),
    "_C::paged_attention_v1": (paged_attention, f"(Tensor(a!) out, {_DECODING}{_DECODED}{_SPARSE}"),
    "_C::paged_attention_v2": (paged_attention, f"{_PARTIAL}{_DECODING}{_DECODED}{_SPARSE}"),
    "_rocm_C::paged_attention": (
        paged_attention,
        f"{_PARTIAL}{_DECODING}Tensor? query_start_loc, {_DECODED}Tensor? fp8_out_scale=None, "
        'str mfma_type="bf16") -> ()',
        f"{_PARTIAL}{_DECODING}{_DECODED}Tensor? fp8_out_scale=None) -> ()",
    ),
    "_vllm_fa2_C::varlen_fwd": (flash, _VARLEN, _VARLEN.replace("Generator? gen", "int num_splits, Tensor? gen")),
    "_vllm_fa3_C::fwd": (flash, _FLASH3, _CHUNKED),
    "sgl_kernel::fwd": (flash, _FLASH3, _CHUNKED),
    "aiter::mha_varlen_fwd": (
        renamed(flash, _AITER_NAMES),
        *(
            f"{_AITER_PACKED}{_AITER_LIMITS.format('int min_seqlen_q, ', sinks)}{_AITER_OUT.format(_AITER_TABLE)}"
            f"{_AITER_PADDED}, Tensor? sink_ptr=None) {_AITER_RESULTS}"
            for sinks in ("int sink_size, ", "")
        ),
    ),
    "aiter::fmha_v3_varlen_fwd": (
        renamed(flash, _AITER_NAMES),
        f"{_AITER_PACKED}{_AITER_LIMITS.format('int min_seqlen_q, ', '')}int how_v3_bf16_cvt, "
        f"{_AITER_OUT.format(_AITER_TABLE)}{_AITER_PADDED}) {_AITER_RESULTS}",
    ),
    "aiter::mha_batch_prefill": (
        renamed(listed_pages, _AITER_NAMES),
        *(
            "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor kv_indptr, Tensor kv_page_indices, "
            f"{_AITER_LIMITS.format('', sinks)}{_AITER_OUT.format('')}Tensor? kv_block_descale=None, "
            "Tensor? kv_last_page_lens=None, Tensor? block_table=None, Tensor? seqlen_k=None, "
            f"Tensor? sink_ptr=None, Generator? gen=None) {_AITER_RESULTS}"
            for sinks in ("int sink_size, ", "")
        ),
    ),
    "aiter::paged_attention_ragged": (
        decode_of_listed_pages,
        "(Tensor(a!) out, Tensor workspace_buffer, Tensor query, Tensor key_cache, Tensor value_cache, float scale, "
        "Tensor kv_indptr, Tensor kv_page_indices, Tensor kv_last_page_lens, int block_size, int max_num_partitions, "
        'Tensor? alibi_slopes=None, str kv_cache_dtype="auto", str kv_cache_layout="NHD", float logits_soft_cap=0.0, '
        "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? fp8_out_scale=None, int partition_size=256, int mtp=1) "
        "-> Tensor",
    ),
    **{
        f"{library}::fwd_kvcache_mla": (
            renamed(latent_decode, _LATENT_NAMES),
            f"(Tensor q, Tensor kv_cache, {_PLANNED}, bool is_fp8, Tensor? indices) -> Tensor[]",
            f"(Tensor q, Tensor kv_cache, {_PLANNED}, bool is_fp8, Tensor? indices, Tensor? attn_sink, "
            "Tensor? extra_k_cache, Tensor? extra_indices_in_kvcache, Tensor? topk_length, Tensor? extra_topk_length) "
            "-> Tensor[]",
            f"(Tensor q, Tensor k_cache, {_PLANNED}, Tensor? descale_q, Tensor? descale_k) -> Tensor[]",
            f"(Tensor q, Tensor kcache, Tensor? vcache, {_PLANNED}) -> Tensor[]",
        )
        for library in ("_flashmla_C", "sgl_kernel")
    },
    **{
        name: (renamed(latent_attention, _LATENT_NAMES), *(f"(Tensor(a!) out, {each}) -> ()" for each in schemas))
        for name, schemas in (
            ("_C::cutlass_mla_decode", (f"{_LATENT}float scale",)),
            (
                "_C::sm100_cutlass_mla_decode",
                (
                    f"Tensor(b!) lse, {_LATENT}Tensor workspace, float scale, int num_kv_splits",
                    f"{_LATENT}Tensor workspace, float scale, int num_kv_splits",
                ),
            ),
            ("sgl_kernel::cutlass_mla_decode", (f"{_LATENT}Tensor(b!) workspace, float sm_scale, int num_kv_splits",)),
        )
    },
    "flashinfer::batch_decode": (
        renamed(decode_of_listed_pages, _FLASHINFER_NAMES),
        "(Tensor(a!) float_workspace_buffer, Tensor(b!) int_workspace_buffer, int[] plan_info_vec, Tensor q, "
        "Tensor paged_k_cache, Tensor paged_v_cache, Tensor paged_kv_indptr, Tensor paged_kv_indices, "
        "Tensor paged_kv_last_page_len, Tensor(c!) o, Tensor(d!)? maybe_lse, int kv_layout_code, int window_left, "
        "bool enable_pdl, Tensor? alibi_slopes, float logits_soft_cap, float sm_scale, float rope_scale, "
        "float rope_theta) -> ()",
    ),
    "flashinfer::batch_prefill_paged": (
        renamed(prefill, _PREFILL_NAMES),
        f"{_PAGED}{_MASKED}{_CUSTOM}{_CAPPED}{_TURNED}) -> ()",
        f"{_PAGED}{_ITEMIZED}{_TURNED}, int token_pos_in_items_len, {_TABLES}int? max_kv_len=None) -> ()",
        f"{_PAGED}{_ITEMIZED}{_TURNED}, int token_pos_in_items_len, {_TABLES}int? max_kv_len=None, "
        "Tensor? sinks=None) -> ()",
        f"{_PAGED}{_ITEMIZED}{_QKV_SCALES}{_TURNED}, int token_pos_in_items_len, int workspace_size, {_TABLES}"
        "int? max_q_len=None, int? max_kv_len=None, int? batch_size=None, Tensor? cum_seq_lens_q=None, "
        "Tensor? cum_seq_lens_kv=None, Tensor? sinks=None) -> ()",
    ),
    "flashinfer::batch_prefill_ragged": (
        renamed(prefill, _PREFILL_NAMES | {"kv_indptr": "cu_seqlens_k"}),
        f"{_RAGGED}{_MASKED}{_CUSTOM}{_CAPPED}{_TURNED}) -> ()",
        f"{_RAGGED}{_ITEMIZED}{_TURNED}, int token_pos_in_items_len) -> ()",
        f"{_RAGGED}{_ITEMIZED}{_TURNED}, int token_pos_in_items_len, Tensor? scale_q=None, Tensor? scale_k=None, "
        "Tensor? scale_v=None) -> ()",
    ),
    "flashinfer::single_prefill": (
        renamed(prefill, _PREFILL_NAMES),
        f"{_SINGLE}{_TURNED}) -> ()",
        f"{_SINGLE}{_QKV_SCALES}{_TURNED}) -> ()",
    ),
    **{
        f"{library}::sparse_prefill_fwd": (
            chosen_attention,
            f"{_CHOSEN}) -> Tensor[]",
            f"{_CHOSEN}, Tensor? attn_sink=None, Tensor? topk_length=None) -> Tensor[]",
            f"{_CHOSEN}, Tensor? attn_sink, Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]",
        )
        for library in ("_flashmla_C", "sgl_kernel")
    },
    "vllm::unified_mla_attention": (
        latent_attention_of_a_step,
        f'{_LATENT_STEP}str layer_name="") -> Tensor',
        f'{_LATENT_STEP}str layer_name="", Tensor? kv_cache_dummy_dep=None) -> Tensor',
    ),
    "vllm::unified_mla_attention_with_output": (
        latent_attention_of_a_step,
        *(
            f'{_LATENT_STEP}Tensor(a!) output, str layer_name="", Tensor? output_scale=None, '
            f"Tensor? output_block_scale=None{more}) -> ()"
            for more in (
                "",
                ", Tensor? kv_cache_dummy_dep=None",
                ", Tensor? kv_cache_dummy_dep=None, int? quant_group_size=None, bool? quant_scale_ue8m0=None, "
                "bool? quant_col_major=None, bool? quant_tma_aligned=None, Tensor? q_dcp_replicated=None",
            )
        ),
    ),
    **{
        f"aiter::rope_{name}fwd_impl": (rope, f"{tensors}{angles}{_ROPE}")
        for kind, angles in (
            ("{}", "Tensor freqs, "),
            ("cached_{}", "Tensor cos, Tensor sin, "),
            ("cached_positions_{}", "Tensor cos, Tensor sin, Tensor positions, "),
        )
        for name, tensors in ((kind.format(""), _ONE), (kind.format("2c_"), _TWO))
    },
    "aiter::rotary_embedding_fwd": (
        rotary,
        "(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_cache, Tensor sin_cache, "
        "bool is_neox, bool is_nope_first) -> ()",
    ),
    **{
        f"aiter::ck_moe_stage{place}": (
            renamed(expert_stage(place), {data: "data"}),
            f"(Tensor {data}, {_SORTED}int topk, str? kernelName=None, Tensor? w{place}_scale=None, "
            f"Tensor? a{place}_scale=None, int? block_m=32, Tensor? sorted_weights=None, int quant_type=0, "
            "int activation=0, int? splitk=1, bool use_non_temporal_load=False, str? dst_type=None, "
            "bool is_shuffled=True) -> ()",
        )
        for place, data in ((1, "hidden_states"), (2, "inter_states"))
    },
    "vllm::unified_attention_with_output": (attention_of_a_step, _STEP.format("Tensor(a!) output, ", "()")),
    "vllm::unified_attention": (attention_of_a_step, _STEP.format("", "Tensor")),
    "_moe_C::topk_softmax": (
        topk(),
        f"{_ROUTES}Tensor(c!) token_expert_indices, {_ROUTED}Tensor? bias=None, Tensor? is_padding=None) -> ()",
    ),
    **{
        f"{library}topk_softmax": (
            topk(),
            f"{_ROUTES}Tensor(c!) token_expert_indices, {_ROUTED}int num_shared_experts=0, "
            'str shared_expert_scoring_func="") -> ()',
        )
        for library in ("aiter::", "vllm::rocm_aiter_")
    },
    **{
        f"{library}topk_sigmoid": (topk("sigmoid"), f"{_ROUTES}Tensor gating_output) -> ()")
        for library in ("aiter::", "vllm::rocm_aiter_")
    },
    "_moe_C::topk_sigmoid": (
        topk("sigmoid"),
        f"{_ROUTES}Tensor(c!) token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias, "
        "float routed_scaling_factor=1.0, Tensor? is_padding=None) -> ()",
    ),
    "sgl_kernel::topk_softmax": (
        topk(),
        f"{_ROUTES}{_ROUTED}float moe_softcapping=0.0, Tensor? correction_bias=None) -> ()",
        f"{_ROUTES}Tensor(c!) token_expert_indices, Tensor gating_output) -> ()",
    ),
    "sgl_kernel::topk_sigmoid": (topk("sigmoid"), f"{_ROUTES}{_ROUTED}Tensor? correction_bias=None) -> ()"),
    "_moe_C::grouped_topk": (
        renamed(grouped_topk, _GROUPED),
        "(Tensor scores, int n_group, int topk_group, int topk, bool renormalize, float routed_scaling_factor, "
        "Tensor bias, int scoring_func=0) -> (Tensor, Tensor)",
    ),
    "sgl_kernel::moe_fused_gate": (
        renamed(grouped_topk, _GROUPED),
        "(Tensor input, Tensor bias, int num_expert_group, int topk_group, int topk, int num_fused_shared_experts, "
        "float routed_scaling_factor, bool apply_routed_scaling_factor_on_output=False) -> Tensor[]",
    ),
    **{
        name: (
            renamed(grouped_topk, _GROUPED),
            "(Tensor gating_output, Tensor correction_bias, Tensor(a!) topk_weights, Tensor(b!) topk_ids, "
            "int num_expert_group, int topk_grp, bool need_renorm, float routed_scaling_factor=1.0) -> ()",
        )
        for name in (
            "aiter::biased_grouped_topk_hip",
            "aiter::biased_grouped_topk",
            "vllm::rocm_aiter_biased_grouped_topk",
        )
    },
    "_moe_C::moe_align_block_size": (
        moe_align(0),
        f"{_ALIGN}, Tensor? expert_map=None, Tensor(d!)? scatter_idx=None) -> ()",
    ),
    "_moe_C::sgl_moe_align_block_size": (moe_align(0), f"{_ALIGN}) -> ()"),
    "sgl_kernel::moe_align_block_size": (
        moe_align(-1),
        f"{_ALIGN}{_CUMSUM}",
        f"{_ALIGN}, Tensor? token_cnts_buffer=None{_CUMSUM}",
    ),
    "_moe_C::moe_sum": (
        moe_sum,
        "(Tensor input, Tensor(a!) output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
    ),
    "sgl_kernel::moe_sum": (moe_sum, "(Tensor input, Tensor(a!) output) -> ()"),
    "_moe_C::moe_permute": (
        permuted,
        f"{_PERMUTE}Tensor(a!) permuted_input, {_PERMUTED}) -> ()",
        f"{_PERMUTE}int? align_block_size, Tensor(a!) permuted_input, {_PERMUTED}, Tensor(e!) m_indices) -> ()",
    ),
    "_moe_C::moe_permute_with_scratch": (
        permuted,
        f"{_PERMUTE}Tensor(a!) permuted_input, {_PERMUTED}, Tensor(e!) sort_workspace, "
        "Tensor(f!) permuted_experts_id, Tensor(g!) sorted_row_idx, Tensor(h!) topk_ids_for_sort) -> ()",
    ),
    "_moe_C::moe_unpermute": (
        unpermuted,
        "(Tensor permuted_hidden_states, Tensor topk_weights, Tensor inv_permuted_idx, "
        "Tensor? expert_first_token_offset, int topk, Tensor(a!) hidden_states) -> ()",
        "(Tensor permuted_hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor src_row_id2dst_row_id_map, "
        "Tensor expert_first_token_offset, int n_expert, int n_local_expert, int topk, Tensor(a!) hidden_states) -> ()",
    ),
    **{
        f"{library}::shuffle_rows": (shuffled_rows, "(Tensor input, Tensor map, Tensor(a!) output) -> ()")
        for library in ("_moe_C", "sgl_kernel")
    },
    "_C::cutlass_moe_mm": (
        grouped_product,
        "(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor expert_offsets, "
        "Tensor problem_sizes, Tensor a_strides, Tensor b_strides, Tensor c_strides, bool per_act_token, "
        "bool per_out_ch) -> ()",
    ),
    "_C::merge_attn_states": (
        merged_states,
        "(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, "
        "Tensor suffix_lse, int? prefill_tokens_with_context=None, Tensor? output_scale=None) -> ()",
    ),
    **{
        f"sgl_kernel::merge_state{name}": (
            renamed(merged_states, _MERGED),
            "(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor(a!) v_merged, Tensor(b!) s_merged) -> ()",
        )
        for name in ("", "_v2")
    },
    "aiter::moe_sum": (moe_sum, "(Tensor input, Tensor(a!) output) -> ()"),
    "sgl_kernel::moe_sum_reduce": (moe_sum, "(Tensor input, Tensor(a!) output, float routed_scaling_factor) -> ()"),
    **{
        f"{library}::{place}_fused_experts": (
            renamed(experts, inplace=place == "inplace"),
            *(
                f"{_HIDDEN}{rest.format(_COMBINE if place == 'outplace' else '')}) -> "
                f"{'Tensor' if place == 'outplace' else '()'}"
                for rest in versions
            ),
        )
        for library, versions in (("vllm", _VLLM_EXPERTS), ("sglang", _SGLANG_EXPERTS))
        for place in ("inplace", "outplace")
    },
    "aiter::fused_moe_": (
        experts,
        f"{_AITER_EXPERTS}int block_size_M=-1, Tensor? num_local_tokens=None, int moe_sorting_dispatch_policy=0, "
        f"{_DTYPE}, int hidden_pad=0, int intermediate_pad=0{_BIASES}, float? swiglu_limit=None, float? beta=None, "
        'float? linear_beta=None, str gate_mode="separated", int ep_arena_handle=0, int ep_combine_input_offset=0, '
        "int ep_slot_stride_bytes=0, int ep_max_tokens_per_rank=0, int ep_world_size=0, "
        "Tensor? ep_source_token_map=None) -> Tensor",
    ),
    "vllm::rocm_aiter_fused_moe": (
        experts,
        f"{_AITER_EXPERTS}Tensor? num_local_tokens=None, {_DTYPE}, int hidden_pad=0, int intermediate_pad=0, "
        f'str gate_mode=""{_BIASES}) -> Tensor',
    ),
    **WEIGHTS,
    **SPARSE,
    **STATES,
    **ADAPTERS,
    "vllm::rocm_unquantized_gemm": (
        product("x", "weight", by_rows=True),
        "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    ),
    "_rocm_C::LLMM1": (product("in_b", "in_a", by_rows=True), f"{_SKINNY}int rows_per_block) -> Tensor"),
    **{
        f"_rocm_C::{name}": (
            renamed(product("in_b", "in_a", by_rows=True), {"in_bias": "bias"}),
            f"{_SKINNY}Tensor? in_bias, int CuCount) -> Tensor",
            f"{_SKINNY}int CuCount) -> Tensor",
        )
        for name in ("wvSplitK", "wvSplitKrc")
    },
    "_rocm_C::wvSplitKQ": (
        renamed(product("in_b", "in_a", "scale_b", "scale_a", "out_c", by_rows=True), {"in_bias": "bias"}),
        f"{_SKINNY}Tensor? in_bias, Tensor(a!) out_c, Tensor scale_a, Tensor scale_b, int CuCount) -> ()",
        f"{_SKINNY}Tensor(a!) out_c, Tensor scale_a, Tensor scale_b, int CuCount) -> ()",
    ),
    **{
        f"sgl_kernel::{name}_scaled_mm": (
            product("mat_a", "mat_b", "scales_a", "scales_b"),
            f"{_SCALED}, Tensor? bias=None) -> Tensor",
        )
        for name in ("fp8", "int8", "fp8_blockwise")
    },
    "sgl_kernel::dsv3_router_gemm": (
        product("mat_a", "mat_b", out="output", by_rows=True),
        "(Tensor(a!) output, Tensor mat_a, Tensor mat_b) -> ()",
    ),
    "sgl_kernel::dsv3_fused_a_gemm": (
        product("mat_a", "mat_b", out="output"),
        "(Tensor(a!) output, Tensor mat_a, Tensor mat_b) -> ()",
    ),
    "aiter::gemm_a16w16": (
        renamed(product("A", "B", "scale_a", "scale_b", by_rows=True), {"otype": "dtype"}),
        "(Tensor A, Tensor B, Tensor? bias=None, ScalarType? otype=None, Tensor? scale_a=None, Tensor? scale_b=None, "
        "Tensor? scale_c=None) -> Tensor",
    ),
    "aiter::gemm_a8w8_CK": (
        product("XQ", "WQ", "x_scale", "w_scale", by_rows=True),
        f"{_WEIGHTED}Tensor? bias=None, {_DTYPE}, int? splitK=None) -> Tensor",
    ),
    "aiter::gemm_a8w8_blockscale": (
        product("XQ", "WQ", "x_scale", "w_scale", by_rows=True),
        f"{_WEIGHTED}{_DTYPE}, bool isBpreshuffled=False) -> Tensor",
    ),
    **{
        f"vllm::rocm_aiter_{name}": (
            renamed(product("A", "B", "As", "Bs", by_rows=True), {"output_dtype": "dtype"}),
            f"(Tensor A, Tensor B, Tensor As, Tensor Bs, {more}ScalarType? output_dtype=None) -> Tensor",
        )
        for name, more in (
            ("w8a8_gemm", "Tensor? bias=None, "),
            ("gemm_w8a8", "Tensor? bias=None, "),
            ("gemm_a8w8", "Tensor? bias=None, "),
            ("gemm_w8a8_blockscale", "int[]? block_size=None, "),
            ("gemm_a8w8_blockscale", ""),
            ("triton_gemm_a8w8_blockscale", ""),
        )
    },
    "vllm::rocm_aiter_rms_norm": (
        renamed(rms_norm("", "variance_epsilon"), {"x": "input"}),
        "(Tensor x, Tensor weight, float variance_epsilon) -> Tensor",
    ),
    "vllm::rocm_aiter_rmsnorm2d_fwd_with_add": (
        norm_of_sum,
        "(Tensor x, Tensor residual, Tensor weight, float variance_epsilon) -> (Tensor, Tensor)",
    ),
    "sglang::unified_attention_with_output": (
        attention_of_a_step,
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) output, bool save_kv_cache, int layer_id, "
        "Tensor? q_rope=None, Tensor? k_rope=None, Tensor? sinks=None) -> ()",
    ),
    **{
        f"sgl_kernel::{'gemma_' * gemma}{name}": (rule("eps", gemma), f"{schema} eps, bool enable_pdl=False) -> ()")
        for gemma in (0, 1)
        for name, rule, schema in (
            ("rmsnorm", lambda *options: rms_norm("output", *options), f"(Tensor(a!) output, {_NORM}"),
            ("fused_add_rmsnorm", fused_add_norm, _ADD_NORM),
        )
    },
    **{
        f"{library}::rotary_embedding": (
            rotary,
            "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
            "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        )
        for library in ("_C", "sgl_kernel")
    },
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": (
        rope_by_positions,
        "(Tensor q, Tensor k, Tensor(a!) q_rope, Tensor(b!) k_rope, Tensor cos_sin_cache, Tensor pos_ids, "
        "bool interleave, int cuda_stream=0) -> ()",
        "(Tensor q, Tensor k, Tensor(a!) q_rope, Tensor(b!) k_rope, Tensor cos_sin_cache, Tensor pos_ids, "
        "bool interleave, bool enable_pdl, int cuda_stream=0, Tensor? v=None, Tensor(c!)? k_buffer=None, "
        "Tensor(d!)? v_buffer=None, Tensor? kv_cache_loc=None) -> ()",
        "(Tensor q, Tensor k, Tensor(a!) q_rope, Tensor(b!) k_rope, Tensor cos_sin_cache, Tensor pos_ids, "
        "bool interleave, bool enable_pdl, Tensor? v, Tensor(c!)? k_buffer, Tensor(d!)? v_buffer, "
        "Tensor? kv_cache_loc) -> ()",
    ),
    "sgl_kernel::sgl_per_token_quant_fp8": (
        dynamic_quant(*_Q_S, by_token=True),
        "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s) -> ()",
    ),
    "sgl_kernel::sgl_per_tensor_quant_fp8": (
        tensor_quant,
        "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, bool is_static) -> ()",
    ),
    "sgl_kernel::sgl_per_token_group_quant_fp8": (group_quant, f"{_GROUPS}) -> ()"),
    "sgl_kernel::sgl_per_token_group_quant_int8": (group_quant, f"{_GROUPS}) -> ()"),
    "sgl_kernel::sgl_per_token_group_quant_8bit": (group_quant, f"{_GROUPS}) -> ()"),
    "sgl_kernel::sgl_per_token_group_quant_8bit_v2": (
        group_quant,
        f"{_GROUPS}, bool fuse_silu_and_mul=False, Tensor? masked_m=None) -> ()",
    ),
    "flashinfer::rmsnorm": (rms_norm("out", "eps"), f"(Tensor(a!) out, {_NORM} eps, bool? enable_pdl=None) -> ()"),
    "flashinfer::fused_add_rmsnorm": (fused_add_norm("eps"), f"{_ADD_NORM} eps, bool? enable_pdl=None) -> ()"),
    **{
        f"aiter::{name}": (rms_norm("", "epsilon"), f"({_NORM} epsilon, {_SENSITIVE}) -> Tensor")
        for name in ("rms_norm", "rmsnorm2d_fwd")
    },
    "aiter::rmsnorm2d_fwd_with_add": (
        norm_with_add,
        f"{_ADDED}Tensor weight, float epsilon, {_SENSITIVE}) -> ()",
        f"{_ADDED}Tensor weight, float epsilon, bool gemma_norm, {_SENSITIVE}) -> ()",
    ),
    "aiter::rmsnorm2d_fwd_with_dynamicquant": (
        norm_dynamic_quant("out", "yscale"),
        f"{_OUT_IN}, Tensor(b!) yscale, Tensor weight, float epsilon, {_SENSITIVE}, int group_size=0, "
        "bool shuffle_scale=False) -> ()",
    ),
    "aiter::rmsnorm2d_fwd_with_add_dynamicquant": (
        norm_dynamic_quant("out", "yscale"),
        f"{_ADDED}Tensor(c!) yscale, Tensor weight, float epsilon, {_SENSITIVE}, int group_size=0, "
        "bool shuffle_scale=False) -> ()",
    ),
    "aiter::add_rmsnorm_quant": (
        norm_dynamic_quant("out", "scale"),
        f"{_ADDED}Tensor(c!) scale, Tensor weight, float epsilon, int group_size=0, bool shuffle_scale=False, "
        "bool gemma_norm=False) -> ()",
    ),
    "aiter::static_per_tensor_quant": (static_quant("out"), f"{_OUT_IN}, Tensor scale) -> ()"),
    "aiter::dynamic_per_tensor_quant": (dynamic_quant("out", by_token=False), f"{_OUT_IN}, Tensor(b!) scale) -> ()"),
    "aiter::dynamic_per_token_scaled_quant": (
        dynamic_quant("out", "scales", by_token=True),
        f"{_OUT_IN}, Tensor(b!) scales, Tensor? scale_ub=None, bool shuffle_scale=False, Tensor? num_rows=None, "
        "int num_rows_factor=1) -> ()",
    ),
    **{
        f"{library}::{name}": (rule, _CACHING)
        for library in ("_C_cache_ops", "aiter")
        for name, rule in (
            ("reshape_and_cache", reshape_and_cache),
            ("reshape_and_cache_flash", reshape_and_cache_flash),
        )
    },
    **{
        f"{library}::{name}": (activation(out, function, **options), f"(Tensor(a!) {out}, Tensor input{more}) -> ()")
        for library, out, more in (
            ("_C", "result", ""),
            ("sgl_kernel", "out", ", bool? enable_pdl=None"),
            ("flashinfer", "out", ", bool? enable_pdl=None"),
            ("aiter", "out", ", float limit=0.0"),
        )
        for name, (function, options) in _GATED.items()
    },
}


def engine_name(name: str) -> str:
    """The name in these tables of an operator that is named after what it is compiled for."""
    found = _COMPILED.match(name)
    return f"flashinfer::{found[1]}{found[2]}" if found else name


ENGINES: dict[str, Any] = {name: rule for name, (rule, *_schemas) in _TABLE.items()}
ENGINE_SCHEMAS = {name: tuple(name + each for each in schemas) for name, (_rule, *schemas) in _TABLE.items()}
