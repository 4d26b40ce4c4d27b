"""Bugs in the kernels over AITER for latent attention."""

from mutations import Bug
from mutations.aiter_rows import bug, values

WRITE = values("latent_cache.mla_kv_write")
ROPE_WRITE = values("latent_cache.mla_rope_kv_write")
UNFUSED = values("mla_unfused.mla_rope_kv_write")
PRODUCT = values("head_product.quantized_linear_by_head")
ASSEMBLY = values("latent_attention.mla_absorbed_attention")
CHOSEN = values("latent_chosen.mla_absorbed_attention")
TRITON = values("latent_attention_triton.mla_absorbed_attention")
PROMPTS = values("latent_prompts.mla_paged_attention")
SPLIT = values("linear_shuffled_split_cat.linear_split_cat")
SPLIT_MXFP4 = values("linear_shuffled_split_cat_mxfp4.linear_split_cat")
INDEX_WRITE = values("indexer.index_write")
INDEX_TOPK = values("indexer.paged_index_topk")
STATELESS = values("latent_prompts.mla_attention")
GUARDS = "tests/kernels/aiter/test_aiter_latent_guards.py"
MODELS = "tests/kernels/aiter/test_aiter_latent_models.py -k ours"

BUGS: list[Bug] = [
    # writes
    bug(
        "latent/latent_cache",
        "concat_and_cache_mla(kv_c, k_pe.squeeze(-2), kv_cache",
        "concat_and_cache_mla(k_pe.squeeze(-2), kv_c, kv_cache",
        WRITE,
    ),
    bug("latent/latent_cache", 'kind = "auto" if scale is None else "fp8"', 'kind = "auto"', WRITE),
    bug(
        "latent/latent_cache",
        "kv_c.new_ones(1, dtype=torch.float32) if scale is None else scale",
        "kv_c.new_ones(1, dtype=torch.float32)",
        WRITE,
    ),
    bug(
        "latent/latent_cache", "if rotated <= min(latent, WIDEST):", "if latent <= WIDEST:", GUARDS
    ),
    bug("latent/latent_cache", "            compute_all_q_rope=True,\n", "", ROPE_WRITE),
    bug(
        "latent/latent_cache",
        'style != "gptj",\n            True,',
        'style == "gptj",\n            True,',
        ROPE_WRITE,
    ),
    bug(
        "latent/latent_cache",
        'style != "gptj",\n            True,',
        'style != "gptj",\n            False,',
        ROPE_WRITE,
    ),
    bug(
        "latent/latent_cache",
        "            as_rows(cos).contiguous(),\n            as_rows(sin).contiguous(),\n",
        "            as_rows(sin).contiguous(),\n            as_rows(cos).contiguous(),\n",
        ROPE_WRITE,
    ),
    bug("latent/latent_cache", "        or _two_angles(style)\n", "", GUARDS),
    bug("latent/latent_cache", "and latent * heads >= LEAST", "", GUARDS),
    bug("latent/latent_rows", ".transpose(-1, -2).flatten(-2)", ".flatten(-2)", ROPE_WRITE),
    bug(
        "latent/latent_rows",
        "_split_pairs(q_pe), _split_pairs(k_pe)",
        "_split_pairs(q_pe), k_pe",
        ROPE_WRITE,
    ),
    bug(
        "latent/mla_unfused",
        "write_tokens(rows.kv_c, k_rotated,",
        "write_tokens(rows.kv_c, rows.k_pe,",
        UNFUSED,
    ),
    bug("latent/head_product", "            transpose_bm_in=True,\n", "", PRODUCT),
    bug(
        "latent/head_product",
        "            group,\n            dtype=x.dtype,",
        "            64,\n            dtype=x.dtype,",
        PRODUCT,
    ),
    # attention in assembly
    bug(
        "latent/latent_attention",
        "        work_info_set,\n        work_indptr,\n        *reduced,\n        page_size=1,",
        "        work_indptr,\n        work_info_set,\n        *reduced,\n        page_size=1,",
        ASSEMBLY,
    ),
    bug(
        "latent/latent_attention",
        "work_indptr=divided.work_indptr,\n        work_info_set=divided.work_info_set,",
        "work_indptr=divided.work_info_set,\n        work_info_set=divided.work_indptr,",
        ASSEMBLY,
    ),
    bug(
        "latent/latent_attention",
        "reduce_final_map=divided.reduce_final_map,\n"
        "        reduce_partial_map=divided.reduce_partial_map,",
        "reduce_final_map=divided.reduce_partial_map,\n"
        "        reduce_partial_map=divided.reduce_final_map,",
        ASSEMBLY,
    ),
    bug(
        "latent/latent_attention",
        "        sm_scale=scale,\n        num_kv",
        "        num_kv",
        ASSEMBLY,
    ),
    bug("latent/latent_attention", "                sm_scale=scale,\n", "", ASSEMBLY),
    bug("latent/latent_attention", "        kv_scale=kv_scale,\n    )", "    )", ASSEMBLY),
    bug("latent/latent_attention", "        dtype_kv=kv_dtype,\n", "", ASSEMBLY),
    bug("latent/latent_attention", "num_keys.clamp(min=1)", "num_keys", ASSEMBLY),
    bug("latent/latent_attention", "tokens,  # so many", "1,  # so many", ASSEMBLY),
    bug("latent/latent_attention", "block_tables, block_size).to", "block_tables, 1).to", ASSEMBLY),
    bug(
        "latent/latent_attention",
        "out = q.new_zeros((tokens, padded(heads), latent))",
        "out = q.new_empty((tokens, padded(heads), latent))",
        ASSEMBLY,
    ),
    bug(
        "latent/latent_attention",
        "            blank_padding(out, query_start, seq_lens)\n",
        "            pass\n",
        ASSEMBLY,
    ),
    bug(
        "latent/latent_attention",
        "out[:, :heads].contiguous()",
        "out[:, -heads:].contiguous()",
        ASSEMBLY,
    ),
    bug("latent/latent_attention", "padded(heads) == 32", "padded(heads) == 64", GUARDS),
    bug(
        "latent/latent_attention",
        '("seq_lens", "block_tables"), _constants',
        '("block_tables", "seq_lens"), _constants',
        ASSEMBLY,
    ),
    Bug("passes/lower.py", "if key not in shared:", "if True:", MODELS),
    bug("latent/latent_chosen", "seq_lens.clamp(max=topk)", "seq_lens", CHOSEN),
    bug("latent/latent_chosen", "if tokens != seq_lens.shape[0]:", "if False:", CHOSEN),
    bug("latent/latent_chosen", "page - page_start[row]", "page % topk", CHOSEN),
    bug(
        "latent/latent_chosen",
        "        blank_padding(out, query_start, seq_lens)\n",
        "",
        CHOSEN,
    ),
    # attention in Triton
    bug(
        "latent/latent_walk",
        "        latent,\n        width - latent,\n",
        "        width - latent,\n        latent,\n",
        TRITON,
    ),
    bug(
        "latent/latent_walk",
        "        None,\n        kv_scale,\n",
        "        kv_scale,\n        None,\n",
        TRITON,
    ),
    bug(
        "latent/latent_walk",
        "if tokens != sequences and kv_cache.dtype != q.dtype:",
        "if False:",
        TRITON,
    ),
    bug(
        "latent/latent_walk",
        "lengths.clamp(min=1),",
        "(lengths - 1).clamp(min=1),",
        TRITON,
    ),
    bug("latent/latent_walk", "        v_scale=kv_scale,\n", "", TRITON),
    bug("latent/latent_walk", "page_size=kv_cache.shape[1]", "page_size=1", TRITON),
    bug(
        "latent/latent_walk",
        "        blank_padding(out, query_start, seq_lens)\n",
        "        pass\n",
        TRITON,
    ),
    bug(
        "latent/latent_walk",
        "    out.masked_fill_((lengths == 0)[:, None, None], 0.0)\n",
        "",
        TRITON,
    ),
    # keys and values of all heads
    bug(
        "latent/latent_prompts",
        "both[..., :nope], rotated), -1)",
        "rotated, both[..., :nope]), -1)",
        STATELESS,
    ),
    bug(
        "latent/latent_prompts",
        "            softmax_scale=scale,\n            causal=True,\n"
        "            window_size=(-1, -1, 0),\n        )",
        "            causal=True,\n            window_size=(-1, -1, 0),\n        )",
        STATELESS,
    ),
    bug(
        "latent/latent_prompts",
        "            softmax_scale=scale,\n            causal=True,\n"
        "            window_size=(-1, -1, 0),\n            out=out,",
        "            causal=True,\n            window_size=(-1, -1, 0),\n            out=out,",
        PROMPTS,
    ),
    bug(
        "latent/latent_prompts",
        "query_start,\n            key_start,",
        "key_start,\n            query_start,",
        PROMPTS,
    ),
    bug(
        "latent/latent_prompts",
        "of_head[:, :nope]).transpose",
        "of_head[:, -nope:]).transpose",
        PROMPTS,
    ),
    bug(
        "latent/latent_prompts",
        "index_select(0, slots), kv_scale,",
        "index_select(0, slots), None,",
        PROMPTS,
    ),
    bug("latent/latent_prompts", "value <= key <= WIDEST", "key <= WIDEST", GUARDS),
    # products over shuffled weights
    bug("linear/linear_shuffled_split_cat", "n % OUTPUTS or k % inputs", "k % inputs", GUARDS),
    bug("linear/linear_shuffled_split_cat_mxfp4", "SHUFFLED = 32", "SHUFFLED = 33", GUARDS),
    bug(
        "linear/linear_shuffled_split_cat",
        "        nope,\n        value,\n",
        "        value,\n        nope,\n",
        SPLIT,
    ),
    bug("linear/linear_shuffled_split_cat", ", is_x_scale_transposed=False", "", SPLIT),
    bug(
        "linear/linear_shuffled_split_cat",
        "shuffled_weight(weight).view(weight.shape[0] // 16, -1)",
        "weight.view(weight.shape[0] // 16, -1)",
        SPLIT,
    ),
    bug("linear/linear_shuffled_split_cat_mxfp4", "SHUFFLED = 32", "SHUFFLED = 64", SPLIT_MXFP4),
    bug(
        "linear/linear_shuffled_split_cat_mxfp4",
        "x, tiles, scales, scale_tiles",
        "x, tiles, scale_tiles, scales",
        SPLIT_MXFP4,
    ),
    # the indexer
    bug("latent/indexer", "slots, WIDTH, ", "slots, WIDTH // 2, ", INDEX_WRITE),
    bug(
        "latent/indexer",
        "index_cache.view(-1, 1, WIDTH",
        "index_cache.view(-1, 16, WIDTH",
        INDEX_WRITE,
    ),
    bug("latent/indexer", "k=topk, stable=True", "k=topk", INDEX_TOPK),
    bug(
        "latent/latent_walk",
        "seen = (seq_lens - query_start[1:])",
        "seen = (seq_lens - query_start[:-1])",
        INDEX_TOPK,
    ),
    bug("latent/indexer", "chosen.masked_fill_(number >= lengths[:, None], -1)", "", INDEX_TOPK),
    bug("latent/indexer", "* block_size + offset", "+ offset", INDEX_TOPK),
    bug(
        "latent/latent_walk",
        "torch.where(row < query_start[-1], seen, 0)",
        "seen",
        INDEX_TOPK,
    ),
]
