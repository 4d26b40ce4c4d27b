"""Which tests must notice mutants of which functions, and how many of them.

To add a file, add a row. A survivor is a missing test, or cannot be noticed: then it is in SURVIVORS
with the reason, and is not counted.
"""

from dataclasses import dataclass

FLOOR = 0.5
# Where measured, another share of the mutants that are counted.
FLOORS = {
    "atomc/compiler/sink_pointwise.py": 0.75,
    "atomc/parallel/shard_slice.py": 0.75,
    "atomc/parallel/expert_placement.py": 0.75,
    "atomc/parallel/sharding.py": 0.75,
    "runtime/constrained/closed_schema.py": 0.75,
    "runtime/server/http/web_pages.py": 1.0,
    "runtime/turns.py": 0.75,
}

SURVIVORS = {
    "runtime/turns.py: Turns._wake_next: for changed in list(self._waiting)[:1]:"
    " -> for changed in list(self._waiting)[:2]:": "a thread that is woken in vain waits again",
}


@dataclass(frozen=True)
class Target:
    """A source file, the arguments of pytest, and the functions that are changed: none means all."""

    file: str
    tests: str
    functions: frozenset[str]

    @property
    def floor(self) -> float:
        """The share of mutants that must turn a test red."""
        return FLOORS.get(self.file, FLOOR)

    def __str__(self) -> str:
        return " ".join([self.file, *sorted(self.functions)])


def targets() -> list[Target]:
    """The rows of TABLE."""
    rows = [[cell.strip() for cell in row.split("|")] for row in TABLE.strip().splitlines()]
    return [
        Target(file, _below_tests(tests), frozenset(" ".join(functions).split()))
        for file, tests, *functions in rows
    ]


def _below_tests(arguments: str) -> str:
    """Arguments of pytest, with the folder of the tests before each file."""
    return " ".join(f"tests/{word}" if ".py" in word else word for word in arguments.split(" "))


# file | arguments of pytest, below tests/ | functions, where not all
TABLE = r"""
atomc/cache/library_code.py | cache/test_library_code.py
atomc/cache/model_cache.py | cache/test_model_cache_stock.py -k 'second_start and dense' | ModelCache.store
atomc/cache/model_cache.py | runtime/execution/test_encoder_cache.py -k 'traces_no_encoder' | ModelCache.store
atomc/cache/model_fingerprint.py | cache/test_model_cache.py -k 'only_if_it_is_ours or other_inputs' | _is_context_manager_of_ours model_parts
atomc/cache/model_fingerprint.py | cache/test_model_cache_stock.py -k 'seen and function_of' | _ModelDescriber.code
atomc/capture/attention_lengths.py | compiler/test_generate.py -k another
atomc/capture/dtensors.py | compiler/test_dtensors.py -k 'alone_is_recognized or (computes and parallelize_module) or (layouts and biases) or (layouts and sum) or takes_and_returns' | _Conversion._add _Conversion._whole_call _OfProcess.__call__ _equal_locally _local_input
atomc/cli/planning.py | planning/test_plan_stages.py | run
atomc/compiler/bind_sizes.py | compiler/test_partition.py | copy_numbers
atomc/compiler/lower_ranges.py | weights/test_prepared_weights.py | _preparable
atomc/compiler/partition.py | compiler/test_partition.py
atomc/compiler/worth_inductor.py | compiler/test_worth_inductor.py
atomc/compiler/pipeline.py | kernels/test_batch_invariant.py -k 'quantized_experts' | _Run.checked
atomc/compiler/select.py | kernels/test_batch_invariant.py -k 'quantized_experts' | _joins_rows
atomc/compiler/sink_pointwise.py | passes/test_sink_pointwise.py
atomc/compiler/weight_forms.py | quantization/test_mla_quantized.py -k 'plan_counts' | WeightForms._only_one
atomc/compiler/weight_forms.py | weights/test_memory_held_once.py -k 'no_kernel_for_another_layout or one_at_a_time or tied_to_the_embedding or two_layouts' | WeightForms._only_one WeightForms._restrict WeightForms.refuses WeightForms.settle
atomc/cost/router.py | planning/test_plan_experts.py
atomc/encoder.py | models/test_vision_models.py -k 'user_writes' | EncoderProgram.encode_patches
atomc/encoder.py | runtime/execution/test_encoder_cache.py -k 'traces_no_encoder' | compile_encoder
atomc/encoder.py | runtime/execution/test_encoder_graphs.py -k 'others_may_write' | EncoderProgram.why_no_graph
atomc/graph/mutation.py | passes/test_sink_pointwise.py | mutated
atomc/kernels/cuda/linear.py | kernels/test_cuda_kernels.py | refuse_linear_fp32
atomc/kernels/fla/delta_rule.py | kernels/recurrent/test_fla.py -k 'dtypes_that or few_tokens_are or rule_is_that or wide_keys'
atomc/kernels/fla/library.py | kernels/recurrent/test_fla.py -k 'on_request or on_request or default_compile or version_with'
atomc/kernels/invariant/linear.py | kernels/test_batch_invariant.py -k 'product_to_fp32' | _product
atomc/kernels/invariant/mla.py | kernels/test_batch_invariant.py -k 'token_of_latent and triton' | mla_absorbed_attention
atomc/kernels/invariant/on_cpu.py | kernels/test_batch_invariant.py -k 'product_to_fp32'
atomc/kernels/moe/combinations/flashinfer.py | kernels/moe/test_moe_flashinfer.py | _gate
atomc/kernels/moe/combinations/mori.py | kernels/moe/test_moe_mori.py
atomc/kernels/torch/conv.py | kernels/test_kernels.py -k '[causal_conv1d_update-torch-'
atomc/kernels/torch/delta_rule.py | kernels/test_kernels.py -k '[gated_delta_rule_update-torch-'
atomc/kernels/torch/mla_attention.py | passes/test_mla_attention.py
atomc/kernels/torch/ssm.py | ops/test_ssm_scan.py
atomc/kernels/triton/attention/attention.py | kernels/test_paged_attention.py | _attend _walk
atomc/kernels/triton/attention/combine_splits.py | kernels/test_combine_splits.py | _combine_splits combined empty_splits
atomc/kernels/triton/attention/combine_splits.py | kernels/test_paged_attention.py | add_weighted store_attended
atomc/kernels/triton/attention/sequences.py | kernels/latent/test_mla_prefix.py
atomc/kernels/triton/attention/varlen_attention.py | kernels/test_kernels.py -k '[varlen_attention-triton-'
atomc/kernels/triton/experts/experts_4_bits.py | kernels/test_experts_prefill.py | _product
atomc/kernels/triton/experts/experts_decode.py | kernels/test_experts_decode.py
atomc/kernels/triton/experts/experts_decode_sums.py | kernels/test_kernels.py -k '[moe_experts_mxfp4-triton-'
atomc/kernels/triton/experts/grouped.py | kernels/moe/test_moe_modular.py -k 'leaves_unused' | _batch_rows
atomc/kernels/triton/experts/grouped.py | kernels/test_kernels.py -k '[moe_experts_fp8-triton-' | _product _scales _squares grouped_product launch_pairs pairs_of square_scale store_pairs weight_rows
atomc/kernels/triton/experts/route.py | kernels/test_route_kernel.py | _logits
atomc/kernels/triton/latent/indexer.py | kernels/test_kernels.py -k '[index_write-triton- or [paged_index_topk-triton-'
atomc/kernels/triton/latent/mla_attention.py | kernels/latent/test_mla_branches.py | add_keys
atomc/kernels/triton/latent/mla_chosen.py | kernels/test_kernels.py -k '[mla_absorbed_attention-triton-'
atomc/kernels/triton/latent/mla_prefix.py | kernels/latent/test_mla_prefix.py
atomc/kernels/triton/latent/mla_prompts.py | kernels/test_kernels.py -k '[mla_paged_attention-triton-'
atomc/kernels/triton/linear/batched_head_linear.py | kernels/latent/test_mla_prefix.py | _add_values _queries_to_latents
atomc/kernels/triton/linear/linear.py | kernels/test_kernels.py -k '[linear-triton- or [linear_fp32-triton- or [linear_gated-triton-'
atomc/kernels/triton/linear/lora.py | kernels/test_kernels.py -k 'lora and twenty'
atomc/kernels/triton/linear/lora.py | kernels/test_triton_compiles.py -k 'sm90 and not experts' | _tile
atomc/kernels/triton/linear/lora_few.py | kernels/test_kernels.py -k '(lora and long) or (lora and merged)'
atomc/kernels/triton/recurrent/conv.py | kernels/test_kernels.py -k '[causal_conv1d-triton- or [causal_conv1d_update-triton-'
atomc/kernels/triton/recurrent/conv_delta_rule.py | kernels/recurrent/test_conv_delta_rule.py
atomc/kernels/triton/recurrent/delta_chunks.py | kernels/test_kernels.py -k '[gated_delta_rule-triton- or [gated_delta_rule_update-triton-'
atomc/kernels/triton/recurrent/delta_gates.py | kernels/recurrent/test_conv_delta_rule.py | refuse_delta_gates
atomc/kernels/triton/recurrent/delta_rule.py | kernels/test_kernels.py -k '[gated_delta_rule_update-triton-'
atomc/kernels/triton/recurrent/ssm.py | ops/test_ssm_scan.py | _chunks _of_head _walk
atomc/kernels/triton/rows/activation.py | kernels/test_kernels.py -k '[silu_and_mul-triton-'
atomc/kernels/triton/rows/kv_write.py | kernels/test_kernels.py -k '[kv_write-triton-'
atomc/kernels/triton/rows/norm.py | kernels/test_kernels.py -k '[layer_norm-triton- or [rms_norm-triton-'
atomc/kernels/triton/rows/norm_gated.py | kernels/test_kernels.py -k '[rms_norm_gated-triton-'
atomc/kernels/triton/rows/norm_pair.py | kernels/test_kernels.py -k '[rms_norm_pair_quant-triton-'
atomc/kernels/triton/rows/quant.py | kernels/test_kernels.py -k '[quant_fp8_group-triton-'
atomc/kernels/triton/rows/rotary_tables.py | kernels/test_kernels.py -k '[rotary_tables-triton-'
atomc/kernels/triton/rows/sigmoid_gate.py | kernels/test_kernels.py -k '[sigmoid_and_mul-triton-'
atomc/kernels/triton/w4a16/dequantized.py | kernels/test_kernels.py -k '[linear_nvfp4-triton-'
atomc/kernels/triton/w4a16/fragment_products.py | kernels/test_kernels.py -k '[linear_w4a16-triton- or [moe_experts_w4a16-triton-'
atomc/kernels/triton/w4a16/fragments.py | kernels/test_kernels.py -k '[moe_experts_mxfp4-triton- or [moe_experts_w4a16-triton-'
atomc/kernels/triton/w4a16/fragments.py | kernels/test_triton_compiles.py -k '16_bytes' | fragments
atomc/kernels/triton/w4a16/mxfp4.py | kernels/test_kernels.py -k '[linear_nvfp4-triton-'
atomc/kernels/triton/w4a16/strip_values.py | kernels/linear/test_w4a16.py -k 'e2m1_code'
atomc/kernels/triton/w4a16/strip_values.py | kernels/test_kernels.py -k '[linear_w4a16-triton-'
atomc/kernels/triton/w4a16/w4a16.py | kernels/test_kernels.py -k '[linear_nvfp4-triton-'
atomc/kernels/triton/w4a16/w4a16_mma.py | kernels/linear/test_w4a16.py -k 'not_held_in_strips' | _no_strips
atomc/kernels/triton/w4a16/w4a16_mma.py | kernels/test_kernels.py -k '[linear_w4a16-triton-'
atomc/kernels/triton/w4a16/w4a16_mma_pair.py | kernels/linear/test_w4a16_pair.py | _row
atomc/kernels/triton/w4a16/w4a16_mma_rows.py | kernels/test_kernels.py -k '[linear_mxfp4-triton- or [linear_w4a16-triton-'
atomc/loading/dummy_weights.py | weights/test_memory_held_once.py -k 'counted_as_they_are_stored' | load_dummy
atomc/loading/execute_plan.py | parallel/test_rank_memory.py | read
atomc/loading/load_parts.py | parallel/test_tensor_parallel_loading.py -k '(one and width) or transposed' -m '' | _part
atomc/loading/load_plan.py | models/test_delta_net_models.py -k 'with_images' | _skipped_names
atomc/loading/load_plan.py | models/test_mtp_qwen.py -k 'without_the_draft_layer' | _skipped_names
atomc/loading/loader.py | models/test_delta_net_models.py -k 'with_images' | _model_names
atomc/ops/dispatch.py | kernels/moe/test_dispatch.py
atomc/ops/indexer.py | passes/test_indexer.py -k 'largest_scores' | _chosen
atomc/ops/kv_b_weight.py | quantization/test_mla_quantized.py -k 'with_a_kernel and fp8-25' | kv_b_half
atomc/ops/linear.py | ops/test_ops.py -k 'formulas or linear_fp32' | linear_fp32
atomc/ops/op_cost.py | planning/test_plan_collectives.py planning/test_plan_experts.py | experts sent_to_gather sent_to_sum
atomc/ops/scaled_linear.py | quantization/test_quant_nvfp4.py -k 'merged'
atomc/ops/ssm.py | ops/test_ssm_scan.py | time_steps
atomc/ops/state.py | ops/test_ops.py -k 'no_host_has_memory or pages_of' | _zeros
atomc/parallel/delta_nets.py | parallel/test_delta_net_ranks.py | check cut_of resize
atomc/parallel/expert_placement.py | parallel/test_expert_placement.py
atomc/parallel/heads.py | parallel/test_latent_ranks.py parallel/test_parallelize.py
atomc/parallel/latent_attention.py | parallel/test_latent_ranks.py
atomc/parallel/layers.py | parallel/test_delta_net_ranks.py parallel/test_parallelize.py | _part_of
atomc/parallel/shard_plan.py | parallel/test_parallelize.py | _divide_by_expert
atomc/parallel/shard_slice.py | parallel/test_expert_placement.py parallel/test_parallelize.py parallel/test_vocab_parallel.py
atomc/parallel/sharding.py | parallel/test_delta_net_ranks.py parallel/test_expert_placement.py parallel/test_parallelize.py | Sharding._keep_whole_if_shared Sharding._map_experts Sharding.connect Sharding.of
atomc/parallel/sizes.py | parallel/test_delta_net_ranks.py parallel/test_parallelize.py | _problems _problems_of_widths
atomc/parallel/stages.py | parallel/test_stages.py
atomc/parallel/vocab.py | parallel/test_vocab_parallel.py | LogitsOfRank.largest VocabParallelEmbedding.forward rows_of_rank sum_lookups
atomc/passes/recognize/gated.py | passes/chains/test_spellings.py
atomc/planning/stages.py | planning/test_plan_stages.py
atomc/program.py | weights/test_memory_held_once.py -k 'stock_class' | compile_model
atomc/quantization/kept_layers.py | models/test_delta_net_models.py -k 'stay_in_16' | kept_layers
atomc/quantization/kept_layers.py | models/test_vision_models.py -k 'stays_in_16_bits' | kept_layers
atomc/quantization/kept_layers.py | stock/test_lora_peft.py -k 'keep_them_apart' | _adapters
atomc/quantization/linear.py | stock/test_lora_peft.py -k 'keep_them_apart' | siblings_of
atomc/quantization/packing.py | parallel/test_tensor_parallel_loading.py -k 'gptq' -m '' | _convert_gptq
atomc/quantization/packing.py | quantization/test_quant_nvfp4.py -k 'decompresses' | _convert_nvfp4
atomc/rewriting/rewrite.py | passes/chains/test_spellings.py | _objections
atomc/stock/adapter.py | models/test_delta_net_models.py -k 'without_the_parts' | _enter_layers
atomc/stock/adapter.py | models/test_mamba_models.py -k 'nothing_was_entered_for' | _enter_layers
atomc/stock/batching.py | stock/test_stock_batching.py -k 'as_one_graph or not_a_decode_step' | _attention _paged_layer _sequences
atomc/stock/batching_check.py | stock/test_stock_batching.py -k 'misses_the_cache' | check_batching
atomc/stock/delta_net.py | models/test_delta_net_models.py -k 'wrapped_class and olmo' | _separate
atomc/stock/implementations.py | models/test_shared_keys.py | keep_all_rows
atomc/stock/indexer.py | passes/test_indexer.py -k 'own_indexers' | _forward
atomc/stock/mamba.py | models/test_mamba_models.py -k 'same_logits' | _projected mix
atomc/stock/replaced_forwards.py | models/test_delta_net_models.py -k 'no_gated_delta_net or padding' | LayerKind._why_not_compared _forward
atomc/stock/replaced_forwards.py | models/test_mamba_models.py -k 'refused_with_the_difference or runs_as_its_class' | LayerKind._why_unlike _forward
atomc/stock/short_conv.py | models/test_mamba_models.py -k 'same_logits' | mix
atomc/stock/vision.py | models/test_vision_models.py -k '(embeddings_and_logits and stock and qwen3_vl) or otherwise' | _deepstack_process enter_encoder
atomc/torch_compat/inductor.py | files/test_trusted_folder.py kernels/test_parallel_compile.py | _triton_settings _use_trusted_folders
atomc/trusted_folder.py | files/test_trusted_folder.py
atomc/vllm_plugin.py | compiler/test_vllm_plugin.py -k 'defaults or mode_2 or no_op_for'
atomc/weights/freed.py | weights/test_memory_held_once.py -k 'refuses_to_save' | _replace_freed
atomc/weights/inputs.py | weights/test_padded_weights.py | WeightInputs._pack
atomc/weights/lora.py | runtime/execution/test_lora_files.py | LoraLayer.fitted LoraLayers.write
atomc/weights/packed.py | weights/test_padded_weights.py | concatenated
models/deepseek_v3.py | models/test_moe_models.py -k 'logits_and and deepseek_v3' | _attention_scale
models/deepseek_v32.py | models/test_moe_models.py -k 'logits_and and deepseek_v32' | Indexer.forward
models/gated_delta_net.py | models/test_delta_net_models.py -k 'logits_and_names or without_layer_types' | GatedRMSNorm.forward hybrid_layer_types recur
models/layers.py | models/test_delta_net_models.py -k 'logits_and_names' | OnePlusRMSNorm.forward
models/mrope.py | models/test_mrope.py
models/mtp.py | models/test_mtp_qwen.py -k 'before_the_models_head or (computes_as_written and next) or need_no_field or other_draft_layers' | MTP.__init__ MTP.merge MTP.results WithMTP.stored_draft
models/mtp.py | runtime/test_mtp.py -k 'computes_as_written'
models/qwen3_5.py | models/test_delta_net_models.py -k 'logits_and_names' | SplitDeltaNet.project
models/qwen3_next.py | models/test_delta_net_models.py -k 'logits_and_names' | Attention.forward _unpack
models/qwen3_next.py | models/test_mtp_qwen.py -k 'is_a_layer_of_the_model' | _draft_layers
models/qwen3_vl_vision.py | models/test_vision_models.py -k 'embeddings_and_logits and ours and qwen3_vl' | VisionEncoder.forward
models/vision_language.py | models/test_vision_models.py -k 'embeddings_and_logits and ours and qwen3_vl' | TextModel.forward
models/vision_language.py | runtime/test_mtp_images.py -k 'reads_the_embeddings' | ImageDraftModel.forward
models/vision_patches.py | models/test_vision_models.py -k 'bit_for_bit or computed_once' | _frame _neighbours patch_inputs
passes/select_mla_form.py | quantization/test_mla_quantized.py -k 'with_a_kernel and fp8-25' | _product
passes/bind_state.py | models/test_shared_keys.py | _kept bind_state
passes/reinplace_calls.py | passes/test_reinplace_calls.py
passes/expert_load.py | runtime/ranks/test_ranks_models.py -k 'counts and fp8' | _choices
passes/fuse/activation_quant.py | passes/test_quant_fusion.py | _replacement
passes/fuse/add_norm.py | passes/test_passes.py
passes/fuse/allreduce_add.py | passes/test_collective_fusion.py
passes/fuse/allreduce_norm.py | passes/test_collective_fusion.py
passes/fuse/allreduce_norm_quant.py | passes/test_collective_fusion.py
passes/fuse/conv_delta_rule.py | kernels/recurrent/test_conv_delta_rule.py
passes/fuse/kv_write.py | passes/test_passes.py | _norm_pattern _rope_pattern
passes/fuse/norm_pair.py | passes/test_norm_pair.py
passes/fuse/sums_behind_views.py | passes/test_collective_fusion.py | _can_move
passes/fuse/linear_gated.py | passes/test_linear_gated.py -k 'not stock' | _halved _activation
passes/lift.py | compiler/test_strides.py passes/test_lift_in_bf16.py passes/test_patch_embedding.py | _embedding _patch _rms_norm
passes/lora.py | runtime/execution/test_lora.py -k 'quantized_layers' -m '' | _input
passes/merge/linears.py | weights/test_padded_weights.py | _zero_rows
passes/canonicalize/contiguous_sums.py | passes/test_contiguous_sums.py
passes/recognize/attention/causal_mask.py | passes/test_attention_by_hand.py | _broadcast _compared
passes/recognize/attention/causal_mask.py | passes/test_proven_masks.py | _always
passes/recognize/attention/mask_argument.py | passes/test_attention_by_hand.py | sum_of_masks visible_keys
passes/recognize/attention/match_site.py | passes/test_attention_by_hand.py | _scores_shape
passes/recognize/collectives.py | passes/test_collective_fusion.py | _cases_of
passes/recognize/gated.py | passes/test_passes.py
passes/recognize/linear_fp32.py | kernels/linear/test_linear_fp32.py -k 'adapters_may_change or in_another_dtype or computes_its_logits or is_one_op or names_the_reason or turns_it_off'
passes/recognize/lora_linear.py | stock/test_lora_peft.py -k 'keep_them_apart' | _is_quantized
passes/recognize/mla.py | passes/test_mla_recognition.py -k 'without_anything' | replacement
passes/recognize/mla_quantized.py | quantization/test_mla_quantized.py -k 'with_a_static_scale' | _replacement
passes/recognize/rope.py | passes/test_passes.py | turns_pairs
passes/recognize/rope_before_transpose.py | passes/test_mla_recognition.py -k 'one_op_under' | _rotated_replacement
passes/recognize/rotary_tables.py | passes/test_rotary_tables.py -k 'not stock'
runtime/async_calls.py | runtime/test_turns.py | AsyncCalls._run
runtime/calls.py | runtime/test_turns.py | LLMCall.raise_error
runtime/config.py | runtime/scheduling/test_data_parallel.py | EngineConfig.data_ranks
runtime/constrained/closed_schema.py | runtime/constrained/test_closed_schema.py
runtime/engine.py | runtime/test_turns.py | Engine._collect Engine._serve_with
runtime/execution/block_groups.py | parallel/test_stages.py | BlockGroups.own_part
runtime/execution/capacity.py | runtime/test_engine.py -k 'whose_pages' | check_free
runtime/execution/draft.py | runtime/test_mtp.py -k 'over_the_whole_sequence and chunks' | DraftRunner.propose
runtime/execution/draft_history.py | runtime/test_mtp.py -k 'one_token_further and two' | DraftHistory.moved_back DraftHistory._keep DraftHistory._at
runtime/execution/expert_load.py | runtime/ranks/test_ranks_models.py -k 'counts and bits' -m ''
runtime/execution/graphs.py | replay/test_cudagraphs.py -k 'no_graph_is_left' | StepGraphs.__init__
runtime/execution/graphs.py | runtime/execution/test_image_graphs.py -k 'captured_first' | StepGraphs.capture
runtime/execution/graphs.py | runtime/execution/test_later_graphs.py | shapes_for_later StepGraphs.capture
runtime/execution/graphs.py | runtime/test_state_snapshots.py -k 'graphs_of_their_own' | step_shapes
runtime/execution/images/encoder.py | runtime/test_images.py -k 'encoder_that_fails or on_a_cpu or zero' | ImageEncoder._pixels ImageEncoder.place ImageEncoder.update
runtime/execution/images/encoder_graphs.py | runtime/execution/test_encoder_graphs.py -k 'came_twice or cannot_be_captured or few_graphs or is_held or large_images'
runtime/execution/input_batch.py | runtime/scheduling/test_data_parallel.py | InputBatch.write
runtime/execution/loading/hub.py | runtime/test_wrong_values.py -k 'no and config' | model_folder
runtime/execution/lora/files.py | runtime/execution/test_lora_files.py | AdapterConfig.scale _pair
runtime/execution/lora/rows.py | runtime/execution/test_lora.py -k 'mixed_batch' | LoraRows.update
runtime/execution/pipeline.py | parallel/test_stages.py | _piece
runtime/execution/output_processor.py | runtime/ranks/test_ranks.py -k 'gather_no_logits' | OutputProcessor.sample _only_largest
runtime/execution/output_processor.py | runtime/test_mtp.py -k 'exactly_its_average and 1.0' | _HostResults.result
runtime/execution/reports.py | runtime/ranks/test_rank_reports.py -k 'log or their_stage'
runtime/execution/rope_positions.py | runtime/test_images.py -k '(any_size and 16) or three_axes' | RopePositions._admit
runtime/execution/runner.py | runtime/execution/test_image_graphs.py -k '(any_size and 16) or asleep or no_decode or padding or waits_for' | Runner._logits Runner._replay Runner.capture Runner.drop_graphs
runtime/execution/runner.py | runtime/execution/test_later_graphs.py | Runner.capture_missing
runtime/execution/runner.py | runtime/ranks/test_pipeline.py -k 'outputs_of_one_process' | Runner._staged
runtime/execution/runner.py | runtime/test_sleep.py -k 'asleep_no or (asleep_no and drafts)' -m '' | Runner.free
runtime/execution/runner.py | runtime/test_state_snapshots.py -k 'embeddings or (start_from_snapshots_give and some)' | Runner._staged
runtime/execution/self_check.py | models/test_vision_models.py -k 'self_check' | own_attention
runtime/execution/self_check.py | quantization/test_mla_quantized.py -k 'served_from and stock' | SelfCheck._own_logits
runtime/execution/self_check.py | stock/test_stock_head.py -k 'compared_with' | SelfCheck._whole
runtime/execution/sequence_states.py | runtime/test_state_snapshots.py -k 'copy_moves' | SequenceStates.copy _runs
runtime/execution/views/stock_head.py | stock/test_stock_head.py -k 'is_whole or needs_other' | separable_head
runtime/execution/views/user_module.py | runtime/test_rollouts.py -k 'dropout or optimizer or other_storage or own_attention' | UserModule.traced UserModule.written
runtime/execution/views/user_module.py | stock/test_refused_models.py -k 'llm_cannot_call' | check_forward check_logits
runtime/execution/worker.py | runtime/execution/test_encoder_graphs.py -k 'sleeps' | Worker.sleep
runtime/execution/worker.py | runtime/test_engine.py -k 'whose_pages' | Worker.wake_up
runtime/execution/worker.py | runtime/test_rollouts.py -k 'pooled' | Worker.check
runtime/execution/worker.py | runtime/test_sleep.py -k 'asleep_no' | Worker.sleep
runtime/execution/worker.py | runtime/test_wrong_values.py -k 'weight_is_read' | Worker.__init__
runtime/images/content_parts.py | runtime/images/test_image_prompts.py | split_images
runtime/images/decode.py | runtime/images/test_image_decode.py | _eight_bits open_image
runtime/images/decode_worker.py | runtime/images/test_image_decoder.py | _Limits.extend _prepare
runtime/images/media_access.py | runtime/images/test_media_access.py
runtime/images/placeholders.py | runtime/images/test_image_prompts.py | _cut check_image_tokens place_images
runtime/images/processor.py | runtime/images/test_image_prompts.py | ImageProcessor.prepare
runtime/images/web_fetch.py | runtime/images/test_media_access.py
runtime/interrupts.py | runtime/test_turns.py | interrupts_delayed
runtime/lora_adapters.py | runtime/execution/test_lora.py -k 'keeps_its' | LoraAdapters.load
runtime/processes/fork_server.py | runtime/test_fork_server.py
runtime/processes/stderr_log.py | runtime/test_stderr_log.py
runtime/ranks/executor.py | runtime/ranks/test_ranks.py -k 'dropped_after' | _end
runtime/ranks/executor.py | runtime/ranks/test_ranks_models.py -k 'counts and fp8' | RankExecutor.counts
runtime/ranks/monitor.py | runtime/ranks/test_ranks.py -k 'alike' | Monitor._raise_unless_alike
runtime/ranks/process_group.py | runtime/ranks/test_ranks.py -k 'broken' | abort_collectives
runtime/ranks/rank.py | runtime/ranks/test_ranks.py -k 'outputs_of_one or returns_the_memory or without_its_device' -m '' | Rank._execute Rank._load
runtime/ranks/rank.py | runtime/ranks/test_torchrun.py -k 'not_reach_rank_0' | _exit_when_disconnected
runtime/ranks/torchrun.py | runtime/ranks/test_torchrun.py -k 'does_not_fit or not_those_of_a_group or only_its_own_host or other_flags' | TorchrunLauncher.host TorchrunLauncher.start _comparable check_place settings_from_rank_0
runtime/requests/request.py | runtime/scheduling/test_image_cache.py | overlapping
runtime/requests/sampling_params.py | runtime/ranks/test_ranks.py -k 'gather_no_logits' | SamplingParams.only_largest
runtime/server/anthropic/chat_request.py | runtime/server/protocols/test_messages.py -k 'blocks_become or sampling_fields or switch' | _assistant_message _thinking_switch _user_messages generation_request
runtime/server/anthropic/endpoints.py | runtime/server/protocols/test_messages.py -k 'cut_are_read' | _parsed_arguments
runtime/server/app.py | runtime/server/http/test_web_pages.py
runtime/server/chat/chat.py | runtime/server/protocols/test_responses.py -k 'forced_call_needs' | _structured
runtime/server/engines/engine_group.py | runtime/server/engines/test_engines.py | Engines.load_adapter Engines.sleep
runtime/server/engines/engine_process.py | runtime/server/test_server_fields.py -k 'sleeps' | EngineLoop._handle
runtime/server/engines/ray_actors/placement.py | runtime/ranks/test_ray.py -k 'each_rank_is or refused_soon or too_few'
runtime/server/engines/start_engines.py | runtime/server/engines/test_server_dp.py -k 'gpus_are_divided' | engine_environments
runtime/server/http/api_keys.py | runtime/server/http/test_web_pages.py | ApiKeys.__init__ ApiKeys.is_admin
runtime/server/http/request_body.py | runtime/server/http/test_unread_body.py | UnreadBodyMiddleware.__call__
runtime/server/http/responses.py | runtime/server/http/test_event_stream.py | EventStream.__call__
runtime/server/http/web_pages.py | runtime/server/http/test_web_pages.py
runtime/server/openai/run_batch.py | runtime/server/protocols/test_batch.py -k 'internal_error or waits_while' | BatchRun._answer BatchRun._respond
runtime/server/operations.py | runtime/server/test_compiler_page.py | compiler_page
runtime/server/parsers/text_buffer.py | runtime/server/parsers/test_tools.py -k 'character_by_character' | TextBuffer.feed
runtime/server/parsers/tool_parsers/format_parser.py | runtime/server/parsers/test_tools.py -k 'understood' | FormatParser._after FormatParser._read_call FormatParser._read_rest_of_text
runtime/server/responses/events.py | runtime/server/protocols/test_responses.py -k 'an_empty_message or count_for_the_item' | OutputItems.add OutputItems.finish
runtime/server/responses/items.py | runtime/server/protocols/test_responses.py -k 'items_of_one_turn' | chat_messages
runtime/server/service/generation.py | runtime/server/test_generation.py | Generation.__aiter__ Generation._raise_error Generation._record_metrics Generation._summary Generation.close Generation.usage
runtime/server/service/image_reader.py | runtime/images/test_image_decoder.py | ImageReader._decode_within
runtime/server/service/model_info.py | runtime/server/test_server_fields.py -k 'all_names' | ModelInfo.check_name
runtime/server/service/response_store.py | runtime/server/protocols/test_responses.py -k 'bounds_the_number or drops_no_other or of_the_key or used_least or used_least_recently' | ResponseStore.delete ResponseStore.get ResponseStore.put
runtime/server/service/sampling.py | runtime/server/test_server.py -k 'say_the_same' | structured_output
runtime/server/service/service.py | runtime/server/http/test_web_pages.py | Service.prefix_salt
runtime/server/service/traces.py | runtime/server/test_traces.py -k 'below_the_clients'
runtime/text/chat_prompts.py | runtime/images/test_image_prompts.py | ChatPrompts.prompt
runtime/torch_modes.py | runtime/test_rollouts.py -k 'change_no_request or inside_and_outside'
runtime/turns.py | runtime/test_turns.py
atomc/compiler/number_tensors.py | compiler/test_number_tensors.py -k 'beside or would' | _reads _takes_tensor number_tensors
atomc/compiler/host_integers.py | compiler/test_host_integers.py | integers_of _only_integers_read symbols_of_sizes compute_on_host
atomc/program.py | runtime/execution/test_repeated_steps.py | Program._forget_steps Program.repeats
atomc/replay/arenas.py | replay/test_repeated_cpu.py -k 'arena' | Arenas.give Arenas.take
atomc/replay/bound.py | replay/test_bound.py | Bound.finish Bound.launch Bound.product Libraries._algorithm Libraries.direct Libraries.kernel Libraries.product _Base.write _Bias.write _Inputs.write _operands
atomc/replay/memory.py | replay/test_repeated.py | Memory.find Memory.place Memory.replace _in_input arrange
atomc/replay/recording.py | replay/test_repeated.py | _Recorder.__torch_dispatch__ _Recorder._append _computes_nothing _is_read_by_host
atomc/replay/repeatable.py | replay/test_repeatable.py | repeats_calls repeats_steps
atomc/replay/repeated.py | replay/test_repeated.py | Repeated._attempt Repeated._inspect Repeated._kind Repeated._recorded Repeated._refused
atomc/replay/shared_calls.py | replay/test_repeated.py | _is_output _is_repeatable _writes _written share_calls
atomc/torch_compat/cublaslt.py | replay/test_bound.py | Product.__init__ Product.algorithms Product.arguments _layout is_product
atomc/torch_compat/cuda_driver.py | replay/test_bound.py | enter_thread launch_config
atomc/torch_compat/cpp_kernels.py | replay/test_repeated_cpu.py | remember_cpp_kernels watched_cpp_kernels
"""
