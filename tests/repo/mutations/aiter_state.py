"""Bugs in the kernels over AITER for attention, rotary positions, cache writes and sums."""

from mutations import Bug

KERNELS = "atomc/kernels/aiter"
GUARDS = "tests/kernels/aiter/test_aiter_state_guards.py"
LAYOUTS = "tests/kernels/aiter/test_aiter_layouts.py"
CHOICE = "tests/compiler/test_layouts.py"
FORMS, OF_FORMS = "atomc/passes/fuse/write_forms.py", "tests/passes/test_write_forms.py"


def values(name: str) -> str:
    return f"tests/kernels/aiter/test_aiter_values.py -k '{name}-'"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"{KERNELS}/{file}.py", old, new, tests)


BUGS = [
    # attention over what is given
    bug(
        "attention/attention",
        "q4, k4, v4, softmax_scale",
        "q4, v4, k4, softmax_scale",
        values("attention.attention"),
    ),
    bug(
        "attention/attention",
        "causal=causal, window_size=seen",
        "causal=False, window_size=seen",
        values("attention.attention"),
    ),
    bug(
        "attention/attention",
        "(window - 1 if window else -1",
        "(window if window else -1",
        values("attention.attention"),
    ),
    bug(
        "attention/attention",
        "softmax_scale=scale,",
        "softmax_scale=None,",
        values("attention.attention"),
    ),
    bug("attention/attention", "if window == 1:", "if window == -1:", GUARDS),
    # of prompts, over gathered keys
    bug(
        "attention/paged_attention",
        "for cache in (k_cache, v_cache)",
        "for cache in (k_cache, k_cache)",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/paged_attention",
        "causal=True,",
        "causal=False,",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/paged_attention",
        "logits_soft_cap=softcap,",
        "logits_soft_cap=0.0,",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/paged_attention",
        "softmax_scale=scale,",
        "softmax_scale=None,",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/paged_attention",
        "key_start[1:], key, right=True)",
        "key_start[1:], key, right=False)",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/paged_attention",
        "+ position % block_size",
        "+ key % block_size",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/shuffled_cache",
        "keys[block, :, :, offset]",
        "keys[block, :, :, place]",
        values("shuffled_attention.paged_attention"),
    ),
    bug(
        "attention/shuffled_cache",
        "values[block, :, piece, :, place]",
        "values[block, :, place, :, piece]",
        values("shuffled_attention.paged_attention"),
    ),
    # over pages
    bug(
        "attention/unified_attention",
        "        k_scale,\n        v_scale,\n        sinks=sinks",
        "        v_scale,\n        k_scale,\n        sinks=sinks",
        values("paged_attention_triton.paged_attention"),
    ),
    bug(
        "attention/unified_attention",
        "(window - 1, 0),",
        "(window, 0),",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/unified_attention",
        "most = 1 if count == sequences else",
        "most = 1 if count >= sequences else",
        values("paged_attention.paged_attention"),
    ),
    bug(
        "attention/unified_attention",
        "    if splits or most == 1:",
        "    if False:",
        values("paged_attention.paged_attention"),
    ),
    # in the shuffled layout
    bug(
        "attention/shuffled_attention",
        "            block_tables,\n            seq_lens,\n            block_tables.stride(0),",
        "            block_tables,\n            query_start[1:].contiguous(),\n            block_tables.stride(0),",
        values("shuffled_attention.paged_attention"),
    ),
    bug(
        "attention/shuffled_attention",
        "*shuffled_views(k_cache, v_cache),",
        "*shuffled_views(v_cache, k_cache),",
        values("shuffled_attention.paged_attention"),
    ),
    bug(
        "attention/shuffled_attention",
        "blank_padding(out, query_start, seq_lens)",
        "pass",
        values("shuffled_attention.paged_attention"),
    ),
    bug(
        "attention/shuffled_attention",
        "if not math.isclose(scale, WIDTH**-0.5, rel_tol=1e-6):",
        "if scale < 0.0:",
        GUARDS,
    ),
    bug(
        "attention/shuffled_cache",
        "v_cache.view(blocks, heads, size // x, width, x)",
        "v_cache.view(blocks, heads, width, size // x, x)",
        values("shuffled_kv_write.kv_write"),
    ),
    bug(
        "attention/shuffled_kv_write",
        "reshape_and_cache(k, v, *shuffled_views",
        "reshape_and_cache(v, k, *shuffled_views",
        values("shuffled_kv_write.kv_write"),
    ),
    bug(
        "attention/shuffled_kv_write",
        '"auto", asm_layout=True)',
        '"auto", asm_layout=False)',
        values("shuffled_kv_write.kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        "torch.cat((cos, sin), -1)",
        "torch.cat((sin, cos), -1)",
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        '            call["eps"],\n            out,',
        "            1.0,\n            out,",
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        '            call["q_weight"],\n            call["k_weight"],',
        '            call["k_weight"],\n            call["q_weight"],',
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        '            k_cache,\n            call["v_cache"],',
        '            call["v_cache"],\n            k_cache,',
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        'is None else call["k_scale"]',
        'is None else call["v_scale"]',
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        'unscaled if call["v_scale"] is None else call["v_scale"]',
        "unscaled",
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        "            tables.shape[1],\n",
        "            q.shape[2],\n",
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "rows/norm_rope_kv_write",
        "shuffled=False",
        "shuffled=True",
        values("norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    bug(
        "attention/shuffled_norm_rope_kv_write",
        "shuffled=True",
        "shuffled=False",
        values("shuffled_norm_rope_kv_write.qk_norm_rope_kv_write"),
    ),
    # the choice of the layout, and what half of a table is
    Bug("atomc/compiler/select.py", "if all(layout in", "if any(layout in", CHOICE),
    Bug("atomc/compiler/select.py", "not (self.options.audit and", "not (False and", CHOICE),
    Bug(FORMS, "known_equal(rows.shape[-1], width)", "True", OF_FORMS),
    Bug(FORMS, "(*steps, rows.storage_offset())", "(rows.storage_offset(),)", OF_FORMS),
    Bug(FORMS, "(*steps, rows.storage_offset())", "steps", OF_FORMS),
    Bug(FORMS, "and known_equal(rows.stride(-1), 1)", "", OF_FORMS),
    Bug(FORMS, "first(node) is kernel or", "", OF_FORMS),
    Bug(FORMS, "(_without_batch, _with_half_tables, _with_both)", "(_with_half_tables,)", OF_FORMS),
    Bug(FORMS, '("q", "k", "v", "cos", "sin")', '("q", "k", "v")', OF_FORMS),
    bug(
        "attention/shuffled_attention_gluon",
        "key_scale=k_scale,",
        "key_scale=v_scale,",
        values("shuffled_attention_gluon.paged_attention"),
    ),
    bug(
        "attention/shuffled_attention_gluon",
        "window + 1 if window else 0",
        "window",
        values("shuffled_attention_gluon.paged_attention"),
    ),
    bug(
        "attention/shuffled_attention_gluon",
        "sinks=sinks,\n            # AITER",
        "sinks=None,\n            # AITER",
        values("shuffled_attention_gluon.paged_attention"),
    ),
    bug(
        "attention/shuffled_attention_gluon",
        "blank_padding(out, query_start, seq_lens)",
        "pass",
        values("shuffled_attention_gluon.paged_attention"),
    ),
    # writes into pages, rotary positions
    bug(
        "rows/kv_write",
        "reshape_and_cache_flash(k, v, k_cache",
        "reshape_and_cache_flash(v, k, k_cache",
        values("kv_write.kv_write"),
    ),
    bug(
        "rows/kv_write",
        'k_cache, v_cache, slots, "auto"',
        'v_cache, k_cache, slots, "auto"',
        values("kv_write.kv_write"),
    ),
    bug(
        "rows/kv_write",
        "        _unequal_blocks,\n",
        "",
        GUARDS,
    ),
    bug(
        "rows/rope",
        "            table_rows(cos),\n            table_rows(sin),",
        "            table_rows(sin),\n            table_rows(cos),",
        values("rope.rope"),
    ),
    bug(
        "rows/rope",
        '            style != "neox",\n            False,',
        '            style == "neox",\n            False,',
        values("rope.rope"),
    ),
    bug(
        "rows/rope",
        '            style != "neox",\n            False,',
        '            style != "neox",\n            True,',
        values("rope.rope"),
    ),
    bug("rows/rope", '"gptj": 1}', '"gptj": 0}', values("rope.rope")),
    # sums over processes
    bug(
        "collective/collective",
        "x.contiguous(), residual.contiguous(), weight",
        "residual.contiguous(), x.contiguous(), weight",
        GUARDS,
    ),
    bug(
        "collective/collective",
        "weight, eps, gemma_norm",
        "weight, 1.0, gemma_norm",
        values("collective.allreduce_add_rms_norm"),
    ),
    bug(
        "collective/collective",
        'style == "one_plus"',
        'style != "one_plus"',
        values("collective.allreduce_add_rms_norm"),
    ),
    bug("collective/collective", "return out.clone() if out is own else out", "return out", GUARDS),
    # the layout as a whole
    Bug(
        "atomc/ops/state.py",
        'Layout("shuffled", (0, 1, 2, 3), 16, shuffled=True)',
        'Layout("shuffled", (0, 1, 2, 3), 32, shuffled=True)',
        LAYOUTS,
    ),
]
