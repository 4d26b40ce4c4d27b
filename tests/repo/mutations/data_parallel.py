"""Bugs in ranks that have requests of their own and share experts."""

from mutations import Bug

TESTS = "tests/runtime/scheduling/test_data_parallel.py -k"
MODELS = "tests/runtime/ranks/test_ranks_models.py -k"
SENT = "tests/kernels/moe/test_moe_across_processes.py -k 'op and reference'"
BUGS = [
    Bug("runtime/scheduling/data_parallel.py", "key=lambda rank: len(rank.requests)", "key=lambda rank: 0", f"{TESTS} fewest"),
    Bug("runtime/scheduling/data_parallel.py", "        if prompt != of_last:\n", "        if True:\n", f"{TESTS} choices"),
    Bug("runtime/scheduling/data_parallel.py", "                start = end\n", "", f"{TESTS} random"),
    Bug("runtime/scheduling/data_parallel.py", "(waiting := len(self.waiting))", "(waiting := 0)", f"{TESTS} queue"),
    Bug("runtime/scheduling/step.py", "part.released, size=self.padded_size)", "part.released)", f"{TESTS} 'pad or empty'"),
    Bug("runtime/scheduling/step.py", "slice(first, first + counts[rank])", "slice(0, counts[rank])", f"{TESTS} mask"),
    Bug("runtime/execution/input_batch.py", "max(S, 1),", "S,", f"{TESTS} without_work"),
    Bug("runtime/config.py", "self.dp if self.ep and self.tp == 1 else 1", "self.dp if self.ep else 1", f"{TESTS} without_tp"),
    Bug("atomc/ops/dispatch.py", "weighted.masked_fill(local == nowhere, 0.0)", "weighted", "tests/kernels/moe/test_dispatch.py"),
    Bug("atomc/ops/dispatch.py", 'functional.reduce_scatter_tensor(partial.contiguous(), "sum"', 'functional.reduce_scatter_tensor(partial.contiguous(), "max"', SENT),
    Bug("atomc/kernels/moe/as_kernel.py", "rows.masked_fill(rows == nowhere, -1)", "rows", "tests/kernels/moe/test_moe_across_processes.py -k 'op and torch'"),
    Bug("passes/expert_load.py", 'return arguments["ids"], value(places).shape[1]', "return ids, value(places).shape[1]", f"{MODELS} 'counts and fp8'"),
    Bug("runtime/ranks/executor.py", "[counts.expert_load, *self._monitor.expert_loads(number)]", "[counts.expert_load]", f"{MODELS} 'counts and fp8'"),
    Bug("runtime/execution/expert_load.py", "rows.get(name, held)", "held", f"{MODELS} 'counts and bits' -m ''"),
    Bug("passes/fuse/experts_ep.py", "tensor_example(3, 7, dtype=OneOf(torch.int64", "tensor_example(3, 2, dtype=OneOf(torch.int64", "tests/passes/chains/test_blockers.py -k moe_experts_ep"),
    Bug("runtime/execution/reports.py", "first = stages.index(stage)", "first = 0", "tests/runtime/ranks/test_rank_reports.py -k their_stage"),
    Bug("runtime/execution/reports.py", "        log.error(", "        log.debug(", "tests/runtime/ranks/test_rank_reports.py -k log"),
    Bug("atomc/loading/execute_plan.py", "        if not mmap:\n", "        if mmap:\n", "tests/parallel/test_rank_memory.py"),
    Bug("atomc/cost/router.py", "        if isinstance(sent, Node):\n", "        if False:\n", "tests/planning/test_plan_experts.py -k own"),
    Bug("atomc/ops/op_cost.py", "share = 1 if among == count else count / among", "share = 1", "tests/planning/test_plan_experts.py -k same_tokens"),
    Bug("atomc/planning/stages.py", "sent = plan.load.tokens * width", "sent = plan.load.sequences * 2 * width", "tests/planning/test_plan_stages.py -k bytes_and_time"),
    Bug("atomc/cli/planning.py", "[plan.pipeline.planned]", "[-1]", "tests/planning/test_plan_stages.py -k bytes_and_time"),
]  # fmt: skip
