"""Bugs in the kernels over AITER for routers and mixtures of experts."""

from mutations import Bug
from mutations.aiter_rows import bug, values

ROUTE = values("route.topk_route")
EXPERTS = values("experts.moe_experts")
FP8 = values("experts.moe_experts_fp8")
BLOCKS = values("experts_blocks.moe_experts_fp8")
MXFP4 = values("experts_mxfp4.moe_experts_mxfp4")
GUARDS = "tests/kernels/aiter/test_aiter_expert_guards.py"

BUGS: list[Bug] = [
    bug(
        "experts/experts_mxfp4_triton",
        "hidden % COLUMNS or inner % COLUMNS",
        "hidden % COLUMNS",
        f"{GUARDS} -k mxfp4",
    ),
    bug("experts/experts_mxfp4_triton", "        no_mxfp4,\n", "", f"{GUARDS} -k mxfp4"),
    bug(
        "experts/route",
        "torch.empty_like(ids), flat, divided)",
        "torch.empty_like(ids), flat, True)",
        ROUTE,
    ),
    bug("experts/route", "wide, added = flat.to(torch.float32)", "wide, added = flat", ROUTE),
    bug(
        "experts/route",
        "bias_fp32, divided, scale, SCORES[score])",
        "bias_fp32, divided, 1.0, SCORES[score])",
        ROUTE,
    ),
    bug("experts/route", '"sqrt_softplus": "sqrtsoftplus"', '"sqrt_softplus": "sigmoid"', ROUTE),
    bug("experts/route", "ids, flat.contiguous(), bias_fp32", "ids, flat, bias_fp32", ROUTE),
    bug(
        "experts/route",
        "ids, groups, topk_groups, divided, softmax, scale)",
        "ids, topk_groups, groups, divided, softmax, scale)",
        ROUTE,
    ),
    bug("experts/route", 'softmax = score == "softmax"', "softmax = True", ROUTE),
    bug("experts/route", 'renormalize or score == "softmax_of_chosen"', "renormalize", ROUTE),
    bug("experts/route", "UNSORTED = (256, 8, 4, 8)", "UNSORTED = (256, 8, 4, 9)", ROUTE),
    bug(
        "experts/route",
        "groups not in GROUPS or experts // groups % at_once",
        "groups not in GROUPS",
        ROUTE,
    ),
    bug("experts/route", "NEGLIGIBLE = 1e-12", "NEGLIGIBLE = 1.0", ROUTE),
    bug(
        "experts/experts",
        "        pad(weights.to(torch.float32), (0, 1)),\n        pad(numbered(ids, len(gate_up)), (0, 1)),\n",
        "        pad(numbered(ids, len(gate_up)), (0, 1)),\n        pad(weights.to(torch.float32), (0, 1)),\n",
        EXPERTS,
    ),
    bug("experts/experts", "pad(experts, (1, 1))", "pad(experts, (0, 2))", EXPERTS),
    bug("experts/experts", "ids.clamp(-1, experts) + 1", "ids + 1", EXPERTS),
    bug(
        "experts/experts", "pad(weights.to(torch.float32), (0, 1))", "pad(weights, (0, 1))", EXPERTS
    ),
    bug(
        "experts/experts",
        'vars(weight)["is_shuffled"] = True',
        'vars(weight)["is_shuffled"] = False',
        EXPERTS,
    ),
    bug(
        "experts/experts",
        "return Prepared((shuffled_weight(weight), pad",
        "return Prepared((weight.clone(), pad",
        EXPERTS,
    ),
    bug("experts/experts", "doweight_stage1=weight_on_input", "doweight_stage1=False", EXPERTS),
    bug(
        "experts/experts",
        'ACTIVATIONS = {"silu": 0, "gelu": 1}',
        'ACTIVATIONS = {"silu": 0, "gelu": 0}',
        EXPERTS,
    ),
    bug(
        "experts/experts", "w1_scale=w13_scale.contiguous()", "w1_scale=w2_scale.contiguous()", FP8
    ),
    bug("experts/experts", "a2_scale=act_scale", "a2_scale=x_scale", FP8),
    bug(
        "experts/experts",
        "UNQUANTIZED, PER_TENSOR, PER_TOKEN = 0, 1, 2",
        "UNQUANTIZED, PER_TENSOR, PER_TOKEN = 0, 2, 1",
        FP8,
    ),
    bug("experts/experts", "w13_scale = w13_scale.expand(*w13[0].shape[:2], 1)", "pass", FP8),
    bug(
        "experts/experts",
        "        a2_scale=act_scale,\n        dtype=out_dtype,\n",
        "        a2_scale=act_scale,\n",
        FP8,
    ),
    bug("experts/experts", "columns = 256\n", "columns = 128\n", GUARDS),
    bug("experts/experts", "NARROW = 192", "NARROW = 320", GUARDS),
    bug("experts/stages", "            len(is_expert),\n", "            len(w13),\n", BLOCKS),
    bug("experts/stages", "a2_scale=h_scale", "a2_scale=w2_scale", BLOCKS),
    bug("experts/stages", "w1_scale=w13_scale", "w1_scale=x_scale", BLOCKS),
    bug("experts/stages", "sorted_weights=self.routed", "sorted_weights=None", BLOCKS),
    bug("experts/stages", "MANY, FEW = 64, 32", "MANY, FEW = 128, 32", BLOCKS),
    bug(
        "experts/stages",
        "tiled(w13), tiled(w2), self.places",
        "tiled(w2), tiled(w13), self.places",
        BLOCKS,
    ),
    bug("experts/experts_blocks", "gated.view(-1, BLOCK), scales", "gated, scales", BLOCKS),
    bug("experts/experts_blocks", "PER_BLOCK = 4", "PER_BLOCK = 2", BLOCKS),
    bug("experts/experts_mxfp4", "PER_GROUP = 3", "PER_GROUP = 4", MXFP4),
    bug(
        "experts/experts_mxfp4",
        "sorted_scales(x_scale, hidden)",
        "e8m0_view(x_scale.contiguous())",
        MXFP4,
    ),
    bug(
        "experts/experts_mxfp4",
        "dynamic_mxfp4_quant(gated.flatten(0, 1))",
        'ops.quant_mxfp4.reference(gated.flatten(0, 1), "up")',
        MXFP4,
    ),
    bug(
        "experts/experts_mxfp4",
        '        "w2_scale": _relaid_scales,\n',
        '        "w2_scale": lambda scale: Prepared((scale.detach(),)),\n',
        MXFP4,
    ),
    bug(
        "experts/experts_mxfp4",
        "hidden % AT_ONCE or inner % AT_ONCE",
        "hidden % AT_ONCE",
        f"{GUARDS} -k mxfp4",
    ),
    bug("linear/packing", "piece = 16 // numbers.element_size()", "piece = 16", EXPERTS),
]
