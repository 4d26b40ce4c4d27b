"""Bugs in what other programs call: transformers' continuous batching, ops that write in place; and
in the order of glue.
"""

from mutations import Bug


def batching(old: str, new: str, tests: str = "as_one_graph") -> Bug:
    return Bug(
        "atomc/stock/batching.py", old, new, f"tests/stock/test_stock_batching.py -k {tests}"
    )


def in_place(old: str, new: str, tests: str) -> Bug:
    return Bug(
        "passes/reinplace_calls.py", old, new, f"tests/passes/test_reinplace_calls.py -k {tests}"
    )


def sinking(old: str, new: str, tests: str) -> Bug:
    return Bug(
        "atomc/compiler/sink_pointwise.py",
        old,
        new,
        f"tests/passes/test_sink_pointwise.py -k {tests}",
    )


BUGS = [
    sinking(" and not read & written", "", "is_written"),
    sinking("        and not random\n", "", "random"),
    Bug(
        "atomc/graph/mutation.py",
        "{**named, **node.kwargs}.get(name)",
        "named.get(name)",
        "tests/passes/test_sink_pointwise.py -k lowered_op",
    ),
    sinking(" and _is_smaller(read, reader)", "", "more_memory"),
    sinking("and _is_glue(reader)", "", "kernel_reads_first"),
    sinking("            behind[node] = behind[reader]\n", "", "chain"),
    batching("(2 * len(layers) - 1)", "2 * len(layers)"),
    batching(
        "first = 2 * layers.index(number)",
        "first = 2 * max(layers.index(number) - 1, 0) + 1",
    ),
    batching("read if read.shape[0] else slots", "slots"),
    batching("num_tokens + 1 - seq_lens.shape[0]", "0", "not_a_decode_step"),
    Bug(
        "atomc/stock/batching_check.py",
        "if not all(error <= limit for error in by_kind.values()):",
        "if False:",
        "tests/stock/test_stock_batching.py -k misses_the_cache",
    ),
    in_place(
        "storage(node) is not old for node in operands",
        "node is not old for node in operands",
        "copy",
    ),
    in_place("return max(len(_schema(call).returns), 1)", "return 1", "several_results"),
    in_place("position[reader] <= position[call]", "True", "numbers_of_eager"),
]
