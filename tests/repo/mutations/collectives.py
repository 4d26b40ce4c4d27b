"""Bugs in what ranks exchange: sums with the norm that follows, gathers, parts of parameters."""

from mutations import Bug

RANKS = "tests/parallel/test_tensor_parallel.py"
EXCHANGE = "tests/kernels/test_allreduce_kernel.py"
FUSION = "tests/passes/test_collective_fusion.py"
VOCAB = "tests/parallel/test_vocab_parallel.py"
GROUPS = "tests/kernels/aiter/test_aiter_groups.py"
REFUSED = "tests/kernels/aiter/test_aiter_refused.py -k 'sum or collective'"
GRAPHS = "tests/runtime/execution/test_image_graphs.py -k 'context'"
TRITON, AITER = "atomc/kernels/triton/collective", "atomc/kernels/aiter/collective"


def values(name: str) -> str:
    return f"tests/kernels/aiter/test_aiter_values.py -k '{name}-'"


QUANT = values("collective_quant.allreduce_add_rms_norm_quant")
BUGS = [
    # what ops mean
    Bug(
        "atomc/ops/collective.py",
        "all_reduce.reference(x, process_group), residual, weight",
        "all_reduce.reference(residual, process_group), x, weight",
        f"{RANKS} -k computes",
    ),
    Bug(
        "atomc/ops/collective.py",
        "waited.view(ranks, *x.shape).unbind(0)",
        "waited.view(ranks, *x.shape).flip(0).unbind(0)",
        f"{RANKS} -k computes",
    ),
    Bug(
        "atomc/ops/collective_quant.py",
        "all_reduce.reference(x, process_group), residual, weight",
        "all_reduce.reference(residual, process_group), x, weight",
        EXCHANGE,
    ),
    # fusions
    Bug(
        "atomc/passes/fuse/allreduce_norm.py",
        "ops.allreduce_add_rms_norm(x, residual, weight",
        "ops.allreduce_add_rms_norm(residual, x, weight",
        FUSION,
    ),
    Bug(
        "atomc/passes/fuse/allreduce_add.py",
        "ops.all_reduce(_total(x, other, gate), group)",
        "ops.all_reduce(_total(other, x, gate), group)",
        FUSION,
    ),
    # Triton: a sum of torch.distributed, and then the norm
    Bug(
        f"{TRITON}/collective.py",
        "add_rms_norm(all_reduce(x, process_group), residual",
        "add_rms_norm(all_reduce(residual, process_group), x",
        EXCHANGE,
    ),
    Bug(
        f"{TRITON}/collective.py",
        "quantized_norm(all_reduce(x, process_group), residual",
        "quantized_norm(all_reduce(residual, process_group), x",
        EXCHANGE,
    ),
    # Triton: one launch over the memory of all ranks
    Bug(
        f"{TRITON}/allreduce_norm.py",
        "all_reduce_rms_norm(x, residual, weight, eps, peer",
        "all_reduce_rms_norm(residual, x, weight, eps, peer",
        EXCHANGE,
    ),
    Bug(
        f"{TRITON}/allreduce_norm.py",
        "quantized_norm(all_reduce(x, peer_memory.of(process_group)), residual",
        "quantized_norm(all_reduce(residual, peer_memory.of(process_group)), x",
        EXCHANGE,
    ),
    Bug(
        f"{TRITON}/allreduce.py",
        "        x = total.to(dtype).to(tl.float32)",
        "        x = total",
        EXCHANGE,
    ),
    Bug(f"{TRITON}/allreduce.py", "x = (x + residual).to(dtype)", "x = x.to(dtype)", EXCHANGE),
    Bug(f"{TRITON}/allreduce.py", "1 - half)", "half)", EXCHANGE),
    # parts of parameters
    Bug(
        "atomc/parallel/vocab.py",
        "tp.rank * len(module.weight)",
        "(1 - tp.rank) * len(module.weight)",
        f"{RANKS} -k computes",
    ),
    Bug(
        "atomc/parallel/vocab.py",
        "LogitsOfRank(module.out_features, rank * rows,",
        "LogitsOfRank(module.out_features, rows,",
        f"{VOCAB} -k left_apart",
    ),
    Bug(
        "atomc/parallel/sharding.py",
        "dp.rank * tp.size + tp.rank)",
        "tp.rank * dp.size + dp.rank)",
        "tests/parallel/test_expert_placement.py -k own_part",
    ),
    # AITER
    Bug(
        f"{AITER}/collective_quant.py",
        "dense_rows(x),\n        dense_rows(residual),",
        "dense_rows(residual),\n        dense_rows(x),",
        GROUPS,
    ),
    Bug(
        f"{AITER}/collective_quant.py",
        'transpose_scale=norm["column_major"]',
        'transpose_scale=not norm["column_major"]',
        QUANT,
    ),
    Bug(f"{AITER}/collective_quant.py", "scales = scales.contiguous()", "pass", REFUSED),
    Bug(f"{AITER}/groups.py", "pool._pool_seq = 0", "pass", GROUPS),
    Bug(
        "atomc/replay/cudagraphs.py",
        "                if warm_up:\n                    call()",
        "                if warm_up:\n                    with self.capturing():\n"
        "                        call()",
        GROUPS,
    ),
    Bug(
        "runtime/execution/worker.py",
        "self._capture(self.place.capturing)",
        "self._capture()",
        GRAPHS,
    ),
]
