"""Bugs in the adapter of FlashInfer's experts."""

from mutations import Bug

FILE = "atomc/kernels/moe/combinations/flashinfer.py"
GRID = "tests/kernels/moe/test_moe_modular.py -k 'flashinfer"
GATES = "tests/kernels/moe/test_moe_flashinfer.py -k"
BUGS = [
    Bug(FILE, "torch.cat((up, gate), -1)", "torch.cat((gate, up), -1)", f"{GRID} and usual'"),
    Bug(FILE, "swapped(weights.w13.mT).mT.contiguous()", "swapped(weights.w13.mT).mT", f"{GRID} and usual'"),
    Bug(FILE, "w2=weights.w2.contiguous()", "w2=weights.w2", "tests/kernels/moe/test_moe_modular.py -k any_strides"),
    Bug(FILE, "None if weights.b13 is None else swapped(weights.b13)", "weights.b13", f"{GRID} and GPT'"),
    Bug(FILE, "ids.masked_fill(ids < 0, num_experts)", "ids.clamp(min=0)", f"{GRID} and of_no_expert'"),
    Bug(FILE, "ep_size=2", "ep_size=1", f"{GRID} and of_no_expert'"),
    Bug(FILE, "expert_map, num_experts)\n", "None, num_experts)\n", f"{GRID} and by_the_expert_map'"),
    Bug(FILE, "fc1_expert_biases=weights.b13", "fc1_expert_biases=None", f"{GRID} and GPT'"),
    Bug(FILE, "fc2_expert_biases=weights.b2", "fc2_expert_biases=None", f"{GRID} and GPT'"),
    Bug(FILE, "dispatched.weights.float()", "dispatched.weights.float().flip(1)", f"{GRID} and usual'"),
    Bug(FILE, "config.alpha if alpha is None else alpha", "config.alpha", f"{GATES} limit"),
    Bug(FILE, '"swiglu_oai": (None, 1.0)', '"swiglu_oai": (None, 0.0)', f"{GATES} given_by"),
    Bug(FILE, '"swiglu_limit": expert_values(config.limit)', '"swiglu_limit": None', f"{GATES} given_by"),
    Bug(FILE, "return NoOp()", "from atomc.kernels.moe.weight_and_reduce import Contiguous; return Contiguous()", f"{GRID} and usual'"),
]  # fmt: skip
