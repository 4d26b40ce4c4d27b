"""Bugs in rewrites, in our own kernels and in the scheduler."""

from mutations import Bug


def kernel(name: str) -> str:
    return f"tests/kernels/test_kernels.py -k '[{name}-triton-'"


def triton(file: str, old: str, new: str, name: str) -> Bug:
    return Bug(f"atomc/kernels/triton/{file}.py", old, new, kernel(name))


def blocks(old: str, new: str) -> Bug:
    return Bug(
        "runtime/scheduling/blocks.py",
        old,
        new,
        "tests/runtime/scheduling/test_blocks.py tests/runtime/scheduling/test_scheduler.py",
    )


def prefix(file: str, old: str, new: str, test: str) -> Bug:
    return Bug(
        f"atomc/kernels/triton/{file}.py",
        old,
        new,
        f"tests/kernels/latent/test_mla_prefix.py -k '{test}'",
    )


def scheduling(file: str, old: str, new: str) -> Bug:
    return Bug(f"runtime/{file}.py", old, new, "tests/runtime/scheduling/test_scheduler.py")


BUGS = [
    Bug(
        "atomc/compiler/select.py",
        " | Kind.EXPERTS)",
        ")",
        "tests/kernels/test_batch_invariant.py -k quantized_experts",
    ),
    Bug(
        "atomc/compiler/pipeline.py",
        "        except OptionsError:  # it is about what the caller asked for, not about the pass\n            raise\n",
        "",
        "tests/kernels/test_batch_invariant.py -k quantized_experts",
    ),
    Bug(
        "atomc/quantization/packing.py",
        "(1.0 / factor if divides else factor).repeat",
        "factor.repeat",
        "tests/quantization/test_quant_nvfp4.py -k decompresses",
    ),
    Bug(
        "atomc/ops/scaled_linear.py",
        '_merged_parameters(("weight", "weight_scale", "global_scale"), calls)',
        '_merged_parameters(("weight", "weight_scale"), calls)',
        "tests/quantization/test_quant_nvfp4.py -k merged",
    ),
    triton(
        "w4a16/w4a16",
        "tl.load(global_ptr + n, n < N",
        "tl.load(global_ptr + 0 * n, n < N",
        "linear_nvfp4",
    ),
    triton("w4a16/mxfp4", "((code & 127) << 20)", "((code & 63) << 20)", "linear_nvfp4"),
    triton(
        "w4a16/dequantized",
        "tl.load(global_ptr + row,",
        "tl.load(global_ptr + 0 * row,",
        "linear_nvfp4",
    ),
    Bug(
        "passes/bind_state.py",
        'replace(site.spec, name="")',
        'replace(site.spec, name="", paging=None, group=None)',
        "tests/models/test_shared_keys.py -k equal_rows",
    ),
    Bug(
        "passes/bind_state.py",
        "layers.index(writer), inputs",
        "writer, inputs",
        "tests/models/test_shared_keys.py -k equal_rows",
    ),
    Bug(
        "atomc/stock/implementations.py",
        "setattr(module, ROWS_DROPPED_FROM, -1)",
        "setattr(module, ROWS_DROPPED_FROM, 1)",
        "tests/models/test_shared_keys.py -k traced",
    ),
    Bug(
        "passes/lift.py",
        '_arguments(node, ("weight", "indices"))',
        '_arguments(node, ("indices", "weight"))',
        "tests/passes/test_lift_in_bf16.py -k first",
    ),
    Bug(
        "passes/lift.py",
        "torch.finfo(torch.float32).eps if",
        "torch.finfo(x.dtype).eps if",
        "tests/passes/test_lift_in_bf16.py -k eps",
    ),
    Bug(
        "passes/lift.py",
        "if same_strides(fake, wanted) or",
        "if True or",
        "tests/compiler/test_strides.py -k heads_of",
    ),
    Bug(
        "passes/recognize/attention/mask_argument.py",
        "for added in reversed(masks):",
        "for added in masks:",
        "tests/passes/test_attention_by_hand.py -k hidden_twice",
    ),
    Bug(
        "passes/recognize/rope.py",
        "for table in (cos, sin):",
        "for table in ():",
        "tests/passes/test_passes.py -k angle_of_each",
    ),
    Bug(
        "atomc/compiler/lower_ranges.py",
        'weights |= dict.fromkeys(written, "the graph writes it in each call")',
        "",
        "tests/weights/test_prepared_weights.py -k graph_writes",
    ),
    Bug(
        "passes/fuse/add_norm.py",
        "return ops.rms_norm(total, weight, eps, style), total",
        "return ops.rms_norm(total, weight, eps, style), residual",
        "tests/passes/test_passes.py -k add_then_norm",
    ),
    Bug(
        "passes/fuse/add_norm.py",
        "return ops.layer_norm(total, weight, bias, eps), total",
        "return ops.layer_norm(total, bias, weight, eps), total",
        "tests/passes/test_passes.py -k layer_norm_is_lifted_and_folds",
    ),
    Bug(
        "passes/fuse/activation_quant.py",
        "gate, up, scale, scheme=quantizer.scheme",
        "up, gate, scale, scheme=quantizer.scheme",
        "tests/passes/test_quant_fusion.py -k gated",
    ),
    Bug(
        "passes/recognize/mla.py",
        "*state, scale=scale, **some)",
        "*state, scale=0.2, **some)",
        "tests/passes/test_mla_recognition.py -k without_anything",
    ),
    Bug(
        "passes/fuse/norm_pair.py",
        'operands = (x["x"], y["x"], x["weight"], y["weight"], x["eps"])',
        'operands = (x["x"], y["x"], y["weight"], x["weight"], x["eps"])',
        "tests/passes/test_norm_pair.py -k two_ranges",
    ),
    Bug(
        "passes/fuse/norm_pair.py",
        "(2, 3, 5) if _quantizes(y_norm)",
        "(2, 3, 4) if _quantizes(y_norm)",
        "tests/passes/test_norm_pair.py -k read_elsewhere",
    ),
    triton(
        "rows/norm_pair",
        "y_static_ptr,\n            rows,",
        "x_static_ptr,\n            rows,",
        "rms_norm_pair_quant",
    ),
    Bug(
        "passes/recognize/rope_before_transpose.py",
        "ops.rope(transpose(x, 1, 2), transpose(cos, 1, 2), transpose(sin, 1, 2), style)",
        "ops.rope(transpose(x, 1, 2), transpose(sin, 1, 2), transpose(cos, 1, 2), style)",
        "tests/passes/test_mla_recognition.py -k one_op_under",
    ),
    Bug(
        "models/deepseek_v3.py",
        "return scale * mscale * mscale",
        "return scale * mscale",
        "tests/models/test_moe_models.py -k 'logits_and and deepseek_v3'",
    ),
    Bug(
        "models/deepseek_v32.py",
        "self.k_norm(self.wk(x_TD))",
        "self.wk(x_TD)",
        "tests/models/test_moe_models.py -k 'logits_and and deepseek_v32'",
    ),
    Bug(
        "atomc/stock/indexer.py",
        'indexer.config._attn_implementation != "atom"',
        "not hidden_states.numel()",
        "tests/passes/test_indexer.py -k own_indexers",
    ),
    Bug(
        "atomc/ops/indexer.py",
        "dim=-1, descending=True",
        "dim=-1, descending=False",
        "tests/passes/test_indexer.py -k largest_scores",
    ),
    Bug(
        "atomc/kernels/torch/mla_attention.py",
        "chosen[:, None] < 0,",
        "chosen[:, None] < -1,",
        "tests/kernels/test_kernels.py -k 'mla_absorbed_attention-torch and chosen'",
    ),
    Bug(
        "passes/select_mla_form.py",
        "of_head, 1, nope, rows // heads)",
        "of_head, 1, 0, rows // heads - nope)",
        "tests/passes/test_mla_attention.py -k both_forms",
    ),
    Bug(
        "passes/select_mla_form.py",
        "return kernel is not None and not kernel.syncs",
        "return False",
        "tests/quantization/test_mla_quantized.py -k 'on_a_gpu and fp8-h200-1'",
    ),
    Bug(
        "passes/recognize/mla_quantized.py",
        "        zeros,\n        scheme=linear.scheme,",
        "        None,\n        scheme=linear.scheme,",
        "tests/quantization/test_mla_quantized.py -k with_a_static_scale",
    ),
    Bug(
        "atomc/ops/kv_b_weight.py",
        "of_head[:, :nope].mT.contiguous()",
        "of_head[:, -nope:].mT.contiguous()",
        "tests/quantization/test_mla_quantized.py -k 'with_a_kernel and fp8-25'",
    ),
    Bug(
        "atomc/compiler/weight_forms.py",
        "if all(Kind.WEIGHT in called_op(node).kind for _, node in reading.readers):",
        "if False:",
        "tests/quantization/test_mla_quantized.py -k plan_counts",
    ),
    Bug(
        "atomc/compiler/lower_ranges.py",
        "            shown = Report(report.model)\n",
        "",
        "tests/quantization/test_mla_quantized.py -k 'on_a_gpu and fp8-h200-1'",
    ),
    Bug(
        "runtime/execution/self_check.py",
        ", _rows_of_latents(model, report):",
        ":",
        "tests/quantization/test_mla_quantized.py -k 'served_from and stock'",
    ),
    Bug(
        "atomc/kernels/torch/mla_attention.py",
        "cached[:, None, latent:].expand(-1, heads, -1)",
        "cached[:, None, latent:].flip(0).expand(-1, heads, -1)",
        "tests/passes/test_mla_attention.py -k both_forms",
    ),
    triton(
        "latent/mla_attention",
        "(key[None, :] <= position[:, None]) & (key < last)[None, :]",
        "(key < last)[None, :]",
        "mla_absorbed_attention",
    ),
    Bug(
        "atomc/kernels/triton/latent/mla_attention.py",
        "    scores += of_rope\n",
        "    scores = scores\n",
        "tests/kernels/latent/test_mla_branches.py -k decode",
    ),
    Bug(
        "atomc/kernels/invariant/mla.py",
        "_tiling(q),\n        kv_scale",
        "varying.tiling(len(rows), len(seq_lens), q.shape[-2], 4, 64, q.device),\n        kv_scale",
        "tests/kernels/test_batch_invariant.py -k 'token_of_latent and triton'",
    ),
    triton(
        "latent/mla_chosen",
        "last = tl.minimum(position + 1, K)",
        "last = K",
        "mla_absorbed_attention",
    ),
    triton(
        "latent/mla_chosen",
        "lengths - (ends - row) + 1, 0",
        "lengths - (ends - row), 0",
        "mla_absorbed_attention",
    ),
    triton("latent/indexer", "(rank <= left)", "(rank < left)", "paged_index_topk"),
    triton("latent/indexer", "written += tl.sum(taken)", "written += 0", "paged_index_topk"),
    triton("latent/indexer", "tl.maximum(products, 0.0)", "products", "paged_index_topk"),
    triton("latent/indexer", "key * tl.div_rn(1.0, scale)", "key", "index_write"),
    triton("recurrent/conv", "token - (TAPS - 1 - tap)", "token - tap", "causal_conv1d"),
    triton("recurrent/conv", "real & (length > num_new)", "real", "causal_conv1d_update"),
    triton(
        "recurrent/conv",
        "num_new - (TAPS - 1) + row",
        "num_new - TAPS + row",
        "causal_conv1d_update",
    ),
    triton(
        "rows/norm_gated", "y *= gate * tl.sigmoid(gate)", "y *= tl.sigmoid(gate)", "rms_norm_gated"
    ),
    triton("recurrent/delta_rule", " + tl.sum(q * k, 0) * delta", "", "gated_delta_rule_update"),
    triton("recurrent/delta_rule", "real & (length > num_new)", "real", "gated_delta_rule_update"),
    triton(
        "recurrent/delta_chunks", "if end - start > MOST:", "if True:", "gated_delta_rule_update"
    ),
    triton(
        "recurrent/delta_chunks", "inverse -= _matrix", "inverse += _matrix", "gated_delta_rule"
    ),
    triton("recurrent/delta_chunks", "tl.dot(x, y_low, sums)", "sums", "gated_delta_rule"),
    triton("recurrent/delta_chunks", "tl.dot(low, y, sums)", "sums", "gated_delta_rule"),
    triton("recurrent/delta_chunks", "inverse * beta[None, :]", "inverse", "gated_delta_rule"),
    triton(
        "recurrent/delta_chunks", "if s >= num_sequences:", "if False:", "gated_delta_rule_update"
    ),
    Bug(
        "atomc/kernels/torch/delta_rule.py",
        "if lengths[s] == end - start:",
        "if False:",
        "tests/kernels/test_kernels.py -k '[gated_delta_rule_update-torch-'",
    ),
    Bug(
        "atomc/kernels/torch/conv.py",
        "inputs[:, -kept:]",
        "inputs[:, :kept]",
        "tests/kernels/test_kernels.py -k '[causal_conv1d_update-torch-'",
    ),
    triton(
        "latent/mla_prompts",
        "k_rest=_one_block_cache(k_rope)",
        "k_rest=_one_block_cache(k_rope.flip(0))",
        "mla_paged_attention",
    ),
    prefix(
        "linear/batched_head_linear",
        "tl.load(q_at + P + r, rotated)",
        "tl.load(q_at + r, rotated)",
        "projected",
    ),
    prefix(
        "linear/batched_head_linear",
        "if some_have_prefix(",
        "if True or some_have_prefix(",
        "projected",
    ),
    prefix("linear/batched_head_linear", "old_there[:, None] & inside", "inside", "weighed"),
    prefix(
        "linear/batched_head_linear", "inside & (new_lse > without)[:, None]", "inside", "weighed"
    ),
    prefix(
        "linear/batched_head_linear", "(old_there | (new_lse == without))", "old_there", "weighed"
    ),
    prefix("linear/batched_head_linear", "of_old[:, None] * old)", "old)", "weighed"),
    prefix(
        "linear/batched_head_linear",
        "(old_there | (new_lse == without))",
        "(row >= 0)",
        "not_written",
    ),
    prefix(
        "attention/sequences", "(starts < last) & (first < ends)", "(starts < last)", "projected"
    ),
    prefix(
        "attention/sequences", "lengths > ends - starts", "lengths >= ends - starts", "projected"
    ),
    prefix("attention/sequences", "passed + tl.cumsum", "tl.cumsum", "rows and many"),
    prefix(
        "attention/sequences", "tile - through + tiles, 0)) * BLOCK_Q", "0, 0)) * BLOCK_Q", "rows"
    ),
    prefix("latent/mla_prefix", "num_tiles * PARTS, tl.num_programs(0)", "2, 1", "rows"),
    prefix("latent/mla_prefix", "each // num_tiles * TILE_HEADS", "0 * TILE_HEADS", "rows"),
    prefix("latent/mla_prefix", '-float("inf"), dtype=', "0.0, dtype=", "rows"),
    Bug(
        "atomc/kernels/triton/attention/attention.py",
        "scores = tl.dot(q_rest, tl.trans(k_rest), scores,",
        "scores = tl.dot(q_rest, tl.trans(k_rest), 0 * scores,",
        "tests/kernels/test_paged_attention.py -k 'any_width and 192'",
    ),
    Bug(
        "atomc/kernels/triton/attention/attention.py",
        "q_at + D + r,",
        "q_at + r,",
        "tests/kernels/test_paged_attention.py -k 'any_width and 192'",
    ),
    Bug(
        "atomc/rewriting/rewrite.py",
        "result = op.overload(*bound.args, **bound.kwargs)",
        "result = op.overload(bound.args[1], bound.args[0], *bound.args[2:], **bound.kwargs)",
        "tests/passes/test_passes.py -k both_gelus",
    ),
    Bug(
        "passes/recognize/rope.py",
        "    return rotate(x, cos, sin, style)",
        "    return rotate(x, sin, cos, style)",
        "tests/passes/test_passes.py -k every_style_of_rotation",
    ),
    Bug(
        "passes/recognize/attention/causal_mask.py",
        "return truth if keeps_dims else None",
        "return truth",
        "tests/passes/test_attention_by_hand.py -k is_broadcast_stays_a_mask",
    ),
    Bug(
        "passes/recognize/attention/causal_mask.py",
        "if rounded := a.rounded or b.rounded:",
        "if rounded := a.rounded and b.rounded:",
        "tests/passes/test_attention_by_hand.py -k rounded_positions",
    ),
    Bug(
        "passes/recognize/attention/match_site.py",
        "leading = _mask_dims(walk, leading)",
        "leading = leading",
        "tests/passes/test_attention_by_hand.py -k heads_apart",
    ),
    Bug(
        "passes/recognize/attention/mask_argument.py",
        "band.high == 0 and (",
        "band.high >= 0 and (",
        "tests/passes/test_attention_by_hand.py -k triangle_from_the_first_key",
    ),
    Bug(
        "passes/fuse/kv_write.py",
        "_rope_kv_write(q, k, v, cos, sin",
        "_rope_kv_write(q, v, k, cos, sin",
        "tests/passes/test_passes.py -k the_rotation_and_the_write",
    ),
    triton(
        "rows/norm",
        "tl.sum(x * x, 1)[:, None] / D + eps",
        "tl.sum(x * x, 1)[:, None] / BLOCK + eps",
        "rms_norm",
    ),
    triton(
        "rows/norm",
        "centred = tl.where(column < D, x - tl.sum(x, 1)[:, None] / D, 0.0)",
        "centred = x - tl.sum(x, 1)[:, None] / D",
        "layer_norm",
    ),
    triton(
        "experts/route",
        "choice += tl.load(bias_ptr",
        "scores += tl.load(bias_ptr",
        "topk_route",
    ),
    Bug(
        "atomc/kernels/triton/experts/route.py",
        "rows > MAX_ROWS and x.dtype == logits_dtype",
        "rows > MAX_ROWS",
        "tests/kernels/test_route_kernel.py",
    ),
    Bug(
        "atomc/kernels/triton/w4a16/fragments.py",
        "or (WARPS >= 4 and not ALONE):",
        "or (WARPS >= 1 and not ALONE):",
        "tests/kernels/test_triton_compiles.py -k 16_bytes",
    ),
    triton(
        "w4a16/fragments", "scale.int() + RAISED", "scale.int() + RAISED + 1", "moe_experts_mxfp4"
    ),
    triton("w4a16/fragments", "(4, 10)[j - 1]", "(4, 9)[j - 1]", "moe_experts_mxfp4"),
    triton("w4a16/fragments", "(low | (high << 16))", "(high | (low << 16))", "moe_experts_w4a16"),
    triton(
        "w4a16/fragments",
        "+ place // 8 % WARPS * 16",
        "+ place // 8 % WARPS * 8",
        "moe_experts_w4a16",
    ),
    triton(
        "w4a16/fragments",
        "(row // STRIP * PARTS + part) * STRIP",
        "(row // STRIP * PARTS) * STRIP",
        "moe_experts_mxfp4",
    ),
    Bug(
        "atomc/compiler/bind_sizes.py",
        "if not _is_computed(node) or piece_of[node] == piece:",
        "if True:",
        "tests/compiler/test_partition.py -k number_computed",
    ),
    triton(
        "experts/experts_4_bits",
        "pairs_of(order_ptr, block, P, BLOCK_M)",
        "pairs_of(order_ptr, block + 1, P, BLOCK_M)",
        "moe_experts_mxfp4",
    ),
    Bug(
        "atomc/compiler/partition.py",
        "for count in in_piece.values() if count > 1",
        "for count in in_piece.values()",
        "tests/compiler/test_partition.py -k handful",
    ),
    Bug(
        "atomc/compiler/partition.py",
        "for count in in_piece.values() if count > 1",
        "for count in in_piece.values() if count > 2",
        "tests/compiler/test_partition.py -k many_layers",
    ),
    Bug(
        "passes/recognize/gated.py",
        '"added": tensor_example(3, 10) if added else None',
        '"added": None',
        "tests/passes/chains/test_spellings.py -k sigmoid",
    ),
    Bug(
        "atomc/rewriting/rewrite.py",
        "if one is other or other in one.all_input_nodes:",
        "if one is other:",
        "tests/passes/chains/test_spellings.py -k sigmoid",
    ),
    triton(
        "rows/sigmoid_gate",
        "gate.expand_as(up) if added is None",
        "up if added is None",
        "sigmoid_and_mul",
    ),
    triton("rows/sigmoid_gate", "if ONE_GATE:", "if True:", "sigmoid_and_mul"),
    triton(
        "rows/sigmoid_gate",
        "*row_strides(first)",
        "*row_strides(up)",
        "sigmoid_and_mul",
    ),
    Bug(
        "atomc/torch_compat/inductor.py",
        "set_ptxas.cache_clear()",
        "set_ptxas.cache_info()",
        "tests/kernels/test_parallel_compile.py -k settings",
    ),
    Bug(
        "atomc/torch_compat/inductor.py",
        "os.environ.pop(name, None)",
        "os.environ.get(name)",
        "tests/kernels/test_parallel_compile.py -k settings",
    ),
    Bug(
        "atomc/kernels/triton/experts/experts_4_bits.py",
        "tl.sum((pair < P).to(tl.int32)) <= FEW",
        "tl.sum((pair < P).to(tl.int32)) <= FEW + 1",
        "tests/kernels/test_experts_prefill.py -k quarter",
    ),
    triton(
        "w4a16/fragment_products",
        "return sums + product * scale.to(tl.float32)",
        "return sums + product",
        "moe_experts_w4a16",
    ),
    triton("w4a16/fragments", "* 32 // GROUP * BITS", "* 64 // GROUP * BITS", "moe_experts_w4a16"),
    triton(
        "w4a16/fragment_products",
        "inside, 128 // GROUP), GROUP, 8)",
        "inside, 128 // GROUP), GROUP, 4)",
        "moe_experts_w4a16",
    ),
    triton(
        "experts/experts_decode",
        "row += j // BLOCK_N * I",
        "row += j // BLOCK_N * BLOCK_N",
        "moe_experts",
    ),
    triton(
        "experts/grouped",
        "tl.where(m == 0, block, P)",
        "tl.where(m == 0, block + 1, P)",
        "moe_experts_fp8",
    ),
    Bug(
        "atomc/kernels/triton/experts/experts_decode.py",
        "_most_tokens(w13.shape[0] // 2, ids",
        "_most_tokens(w13.shape[0], ids",
        "tests/kernels/test_experts_decode.py -k experts_of_their_own",
    ),
    Bug(
        "atomc/kernels/triton/attention/combine_splits.py",
        '(lse == -float("inf"))[:, None], 0.0, partial',
        '(lse == float("inf"))[:, None], 0.0, partial',
        "tests/kernels/test_combine_splits.py",
    ),
    triton(
        "experts/experts_decode",
        "pair.to(tl.int64) * I + column",
        "token * I + column",
        "moe_experts",
    ),
    triton(
        "experts/experts_decode_sums",
        "(words << (12 - 4 * NUMBER)) & -0x7FFF8000",
        "(words << (12 - 4 * NUMBER)) & 0x8000",
        "moe_experts_mxfp4",
    ),
    triton(
        "rows/activation", "inside = column < WIDTH", "inside = column <= WIDTH", "silu_and_mul"
    ),
    triton("linear/linear", "(m < M) & (n < N))", "(m < M) & (n <= N))", "linear"),
    triton(
        "rows/quant",
        "(group < (D + GROUP - 1) // GROUP)",
        "(group <= (D + GROUP - 1) // GROUP)",
        "quant_fp8_group",
    ),
    triton("rows/kv_write", "inside = inside & (column < WIDTH)", "inside = inside", "kv_write"),
    blocks("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size"),
    blocks("self.ref_counts[block] += 1", "self.ref_counts[block] = 1"),
    blocks("for block in reversed(table.blocks):", "for block in reversed(table.blocks[1:]):"),
    scheduling("scheduling/scheduler", "request.computed = 0\n", "request.computed = 1\n"),
    scheduling(
        "scheduling/request_queues", "_free_slots.append(request.slot)", "_free_slots.append(0)"
    ),
    scheduling("scheduling/step_builder", "self.budget -= chunk.num_tokens", "self.budget -= 1"),
    scheduling(
        "scheduling/prefix_sharing",
        "keys = request.keys[: (len(request.tokens) - 1) // self.pool.block_size]",
        "keys = request.keys[: len(request.tokens) // self.pool.block_size]",
    ),
    scheduling(
        "scheduling/chunks",
        "start, end = request.computed, request.computed + count",
        "start, end = request.computed, request.computed + count + 1",
    ),
]
