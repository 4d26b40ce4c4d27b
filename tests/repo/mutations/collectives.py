"""Bugs in sums over processes, gathers, vocabularies that are cut, and bytes on the wire."""

from mutations import Bug

FUSION, VOCAB, PLAN = (
    f"tests/{name}.py"
    for name in (
        "passes/test_collective_fusion",
        "parallel/test_vocab_parallel",
        "planning/test_plan_collectives",
    )
)
HELD = f"{VOCAB}::test_every_id_is_held_once_and_the_last_rows_are_zeros"
SCALED = f"{VOCAB}::test_a_class_that_scales_its_lookup_scales_the_rows_of_its_process"
GATHERED = f"{FUSION}::test_columns_of_all_processes_are_gathered_by_one_op"
BUGS = [
    Bug("atomc/parallel/vocab.py", "rows = -(-size // ranks)", "rows = size // ranks", HELD),
    Bug(
        "atomc/parallel/shard_slice.py",
        "padded = tensor.new_zeros(",
        "padded = tensor.new_ones(",
        HELD,
    ),
    Bug("atomc/parallel/vocab.py", "(row < 0) | (row >=", "(row < 0) | (row >", SCALED),
    Bug("atomc/parallel/vocab.py", "(row < 0) | (row >=", "(row <= 0) | (row >=", SCALED),
    Bug(
        "atomc/parallel/vocab.py",
        "        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)\n",
        "",
        SCALED,
    ),
    Bug(
        "atomc/parallel/vocab.py",
        'torch.device("cpu") if module.weight.is_meta else module.weight.device',
        "module.weight.device",
        f"{VOCAB}::test_a_model_on_meta_is_cut_and_keeps_its_first_id",
    ),
    Bug(
        "passes/fuse/sums_behind_views.py",
        "only_reader(total) is view and ",
        "",
        f"{FUSION}::test_a_view_that_others_read_beside_or_of_columns_stays_behind_its_sum",
    ),
    Bug(
        "passes/fuse/sums_behind_views.py",
        " and same_strides(value(x), value(total))",
        "",
        f"{FUSION}::test_a_view_that_others_read_beside_or_of_columns_stays_behind_its_sum",
    ),
    Bug(
        "passes/fuse/allreduce_add.py",
        '"gate": tensor_example(3, 1) if',
        '"gate": tensor_example(3, 10) if',
        f"{FUSION}::test_sums_that_are_not_one_stay",
    ),
    Bug(
        "passes/fuse/allreduce_add.py",
        "nests=True",
        "nests=False",
        f"{FUSION}::test_three_sums_are_one",
    ),
    Bug(
        "passes/fuse/allreduce_add.py",
        "_total(x, other, gate)",
        "_total(x, other, None)",
        f"{FUSION}::test_what_is_added_behind_two_sums_is_summed_once",
    ),
    Bug("passes/recognize/collectives.py", "dims in (2, 3)", "dims in (2,)", GATHERED),
    Bug("passes/recognize/collectives.py", '"unbind", "one row")', '"unbind")', GATHERED),
    Bug(
        "passes/fuse/allreduce_norm.py",
        """\
        Case("last norm", {"swapped": False, "last": True}),
        Case("last norm, operands exchanged", {"swapped": True, "last": True}),
""",
        "",
        f"{FUSION}::test_nothing_reads_the_sum_before_the_last_norm",
    ),
    Bug(
        "passes/fuse/allreduce_norm_quant.py",
        '    {"allreduce_add_rms_norm": {}},',
        '    {"add_rms_norm": {}},',
        f"{FUSION}::test_a_quantizer_joins_the_sum_and_the_norm",
    ),
    Bug(
        "atomc/ops/op_cost.py",
        "2 * (processes - 1) * size / processes",
        "(processes - 1) * size / processes",
        f"{PLAN}::test_a_collective_sends_what_a_ring_sends",
    ),
    Bug(
        "atomc/ops/op_cost.py",
        "return (processes - 1) * own",
        "return processes * own",
        f"{PLAN}::test_a_collective_sends_what_a_ring_sends",
    ),
]
