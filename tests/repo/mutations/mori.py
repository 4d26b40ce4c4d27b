"""Bugs in the adapter of MORI's all-to-all."""

from mutations import Bug

FILE = "atomc/kernels/moe/combinations/mori.py"
GRID = "tests/kernels/moe/test_moe_modular.py -k 'mori and reference"
RANKS = "tests/kernels/moe/test_moe_across_processes.py -k 'mori'"
OWN = "tests/kernels/moe/test_moe_mori.py -k"
BUGS = [
    Bug(FILE, "max(placed.held) + 1", "max(placed.held)", f"{GRID} and of_no_expert'"),
    Bug(FILE, "placed.owner * self.slots + placed.row", "placed.owner * self.slots", RANKS),
    Bug(FILE, "self.ranks.rank * self.slots, placed.held", "0, placed.held", RANKS),
    Bug(FILE, ".masked_fill(slots < 0, self.no_expert)", "", f"{GRID} and of_no_expert'"),
    Bug(FILE, "row_slots.masked_fill(unused, -1)", "row_slots", f"{OWN} nobody_sent"),
    Bug(FILE, ">= used", "> used", f"{OWN} nobody_sent"),
    Bug(FILE, "weights.float().contiguous()", "weights.contiguous()", f"{OWN} made_once"),
    Bug(FILE, "chosen.apply(results, dispatched.weights)", "chosen.apply(results, torch.ones_like(dispatched.weights))", "tests/kernels/moe/test_moe_modular.py -k 'mori and grouped and usual'"),
    Bug(FILE, "[: record.tokens].clone()", "[: record.tokens]", f"{OWN} same_memory"),
    Bug(FILE, "        if key not in self._operators:", "        if True:", f"{OWN} made_once"),
    Bug(FILE, "num_experts_per_rank=self.slots", "num_experts_per_rank=self.slots - 1", RANKS),
    Bug(FILE, "max_token_type_size=torch.float32.itemsize,  # results may be in fp32", "max_token_type_size=codes.dtype.itemsize,", f"{GRID} and fp8'"),
]  # fmt: skip
