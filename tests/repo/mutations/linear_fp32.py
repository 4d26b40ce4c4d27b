"""Bugs in products of 16-bit operands to fp32, and in where they are recognized."""

from mutations import Bug

PASS, OP = "passes/recognize/linear_fp32.py", "atomc/ops/linear.py"
INVARIANT = "tests/kernels/test_batch_invariant.py -k product_to_fp32"


def bug(old: str, new: str, tests: str) -> Bug:
    return Bug(PASS, old, new, f"tests/kernels/linear/test_linear_fp32.py -k '{tests}'")


BUGS = [
    bug("is not ops.linear:", "is None:", "in_another_dtype or computes_its_logits"),
    bug("operands[:2] if uncast", "operands[1:2] if uncast", "names_the_reason"),
    bug("if stored is None:", "if False:", "names_the_reason"),
    bug("if stored_weight is None:", "if False:", "names_the_reason"),
    bug("value(stored_weight).dtype != dtype", "False", "names_the_reason"),
    bug("    if bias:\n", "    if False:\n", "names_the_reason"),
    bug("context.lora is not None and", "False and", "adapters_may_change"),
    bug("overload, (x, weight)", "overload, (weight, x)", "is_one_op"),
    Bug(
        "atomc/compiler/pipeline.py",
        "            if off is None:\n                result = result",
        "            if True:\n                result = result",
        "tests/kernels/linear/test_linear_fp32.py -k turns_it_off",
    ),
    Bug(
        "atomc/compiler/pipeline.py",
        "    sort_topologically(gm.graph)\n    remove_dead_nodes(gm.graph)\n",
        "    sort_topologically(gm.graph)\n",
        "tests/kernels/linear/test_linear_fp32.py -k is_one_op",
    ),
    Bug(
        OP,
        "F.linear(x.to(torch.float32), weight.to(torch.float32))",
        "F.linear(x, weight).to(torch.float32)",
        "tests/ops/test_ops.py -k formulas",
    ),
    Bug(
        OP,
        "(*x.shape[:-1], weight.shape[0]), dtype=torch.float32)",
        "(*x.shape[:-1], weight.shape[0]))",
        "tests/ops/test_ops.py -k linear_fp32",
    ),
    Bug(
        "atomc/kernels/triton/linear/linear.py",
        "multiply(x, weight, None, tile, torch.float32)",
        "multiply(x, weight, None, tile).to(torch.float32)",
        "tests/kernels/test_kernels.py -k '[linear_fp32-triton-'",
    ),
    Bug(
        "atomc/kernels/invariant/linear.py",
        "n), dtype=torch.float32)",
        "n))",
        INVARIANT,
    ),
    Bug(
        "atomc/kernels/invariant/on_cpu.py",
        "linear(x.to(torch.float32), weight.to(torch.float32))",
        "linear(x, weight).to(torch.float32)",
        INVARIANT,
    ),
    Bug(
        "atomc/kernels/cuda/linear.py",
        "unlike(HALVES, x=x, weight=weight) or no_bf16_products(platform, x.dtype)",
        "unlike(HALVES, x=x, weight=weight)",
        "tests/kernels/test_cuda_kernels.py -k products_to_fp32",
    ),
]  # fmt: skip
