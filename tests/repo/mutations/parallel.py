"""Bugs in models that are divided over ranks."""

from mutations import Bug

CUTS = "tests/parallel/test_parallelize.py -k"
NETS = "tests/parallel/test_delta_net_ranks.py -k"
LATENT = "tests/parallel/test_latent_ranks.py -k"
LOADS = "tests/parallel/test_tensor_parallel_loading.py -m '' -k"
PART = f"{LOADS} 'stored_experts and zeros'"


PLACED = "tests/parallel/test_expert_placement.py -k"


DTENSORS = "tests/compiler/test_dtensors.py -k"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"atomc/parallel/{file}", old, new, tests)


BUGS = [
    Bug(
        "atomc/kernels/moe/collectives.py",
        'if x.device.type != "cpu":\n            return pending\n',
        "return pending\n",
        "tests/kernels/moe/test_dispatch.py -k begins_after",
    ),
    bug("heads.py", "place.rank * heads // place.size", "place.rank % heads", f"{CUTS} heads_and_their_state"),
    bug("heads.py", "max(1, groups * parts // size)", "groups", f"{CUTS} share_a_head"),
    bug("shard_slice.py", "self.index * own_length, own_length", "self.index, own_length", f"{CUTS} follow_one_another"),
    bug("shard_slice.py", "size * segment // total", "size // len(self.segments)", f"{CUTS} each_segment"),
    bug("shard_slice.py", "part = tensor.new_empty(shape)", "return tensor.narrow(self.dim, self.index * size, size)", f"{CUTS} 'each_segment or memory_of_its_own'"),
    bug("shard_slice.py", "        if any(size * segment % total for segment in self.segments):\n", "        if False:\n", f"{CUTS} what_does_not_divide"),
    bug("delta_nets.py", "(net.key_dim, net.key_dim, net.value_dim) if _has_segments(name) else (1,)", "(1,)", f"{NETS} queries_keys_and_values"),
    bug("delta_nets.py", 'frozenset({"in_proj_qkv", "conv1d"})', 'frozenset({"in_proj_qkv"})', f"{NETS} 'sum_up and packed'"),
    bug("delta_nets.py", '("num_k_heads", "num_v_heads", "key_dim"', '("num_v_heads", "key_dim"', f"{NETS} 'sum_up and packed'"),
    bug("delta_nets.py", "    if heads % place.size:\n", "    if False:\n", f"{NETS} heads_that_do_not_divide"),
    bug("delta_nets.py", "recurrent.new_empty(0, heads // size, *head)", "recurrent.new_empty(0, heads, *head)", f"{NETS} state_of_its_heads"),
    bug("latent_attention.py", '"colwise") | {OUT: "rowwise"}', '"colwise") | {OUT: "rowwise_split_input"}', "tests/parallel/test_tensor_parallel.py -k 'computes and deepseek_v3'"),
    bug("latent_attention.py", "if name in owners or not", "if not", f"{LATENT} words_of_a_plan"),
    bug("latent_attention.py", 'if others := ", ".join(_others(module)):', 'if others := "":', f"{LATENT} unknown_use"),
    bug("latent_attention.py", "            continue\n        parts", "        parts", f"{LATENT} unknown_use"),
    bug("latent_attention.py", "    return all(is_linear(module.get_submodule(name)) for name in parts & DIVIDED.keys())\n", "    return True\n", f"{LATENT} lacks_a_part"),
    bug("latent_attention.py", '"q_proj", "q_b_proj")\n', '"q_proj",)\n', f"{LATENT} weights_of_its_heads"),
    bug("heads.py", 'vars(attention)["num_heads"] = cut.size_of(number)', "pass", f"{LATENT} 'wrapped_after or weights_of_its_heads'"),
    bug("sharding.py", "_plan_of_others(plan, nets)", "dict(plan)", f"{NETS} gathers_no_projection"),
    bug("sharding.py", '            if how == "rowwise":\n', "            if False:\n", "tests/parallel/test_tensor_parallel.py -k 'computes and qwen3_next'"),
    bug("layers.py", "if length // cut.parts % block), None)", "if part % block), None)", f"{NETS} part_of_a_block"),
    bug("sizes.py", " or LINEAR in types", "", f"{NETS} sizes_are_refused"),
    bug("sharding.py", "if self.place.rank:\n", "if False:\n", f"{CUTS} linear_layer_is_cut"),
    bug("sharding.py", "owners == self.place.rank", "owners == 0", f"{CUTS} by_width_or_by_expert"),
    bug("sharding.py", "            layers.resize_experts(module, self.place.size, by_expert=by_expert)\n", "            module\n", PART),
    bug("layers.py", "if length // cut.parts % block), None)", "if False), None)", f"{CUTS} within_a_block"),
    bug("layers.py", ' and not name.endswith("input_scale")', "", f"{LOADS} 'stored_experts and static and expert'"),
    bug("layers.py", "child._parameters.pop(WHOLE_SHAPE, None)", "pass", PART),
    bug("shard_plan.py", "if not is_part(name)}", "}", f"{CUTS} all_versions"),
    bug("sizes.py", "of_keys % size and size % of_keys", "of_keys % size", f"{CUTS} heads_and_their_state"),
    bug("sizes.py", "size > 1 and width // size % block:", "size > 1 and width % block:", f"{CUTS} sizes_that_do_not"),
    bug("sharding.py", "len(names) > 1 and not divided.issuperset(names)", "False", f"{CUTS} shares_a_weight"),
    bug("layers.py", "(1,) if spec.gate[\"interleaved\"] else GATE_AND_UP", "GATE_AND_UP", "tests/parallel/test_tensor_parallel.py -k 'gpt_oss and not ep'"),
    bug("shard_slice.py", "            return selected\n", "            pass\n", f"{PLACED} 'any_members or one_by_one'"),
    bug("shard_slice.py", "self.members.index(index) if index in self.members else None", "self.index", f"{PLACED} int4"),
    bug("expert_placement.py", "key=lambda number: -tokens[number]", "key=lambda number: number", f"{PLACED} largest_expert"),
    bug("expert_placement.py", "if room[r])", ")", f"{PLACED} equally_many"),
    bug("expert_placement.py", "tuple(placed) if better else ranges", "tuple(placed)", f"{PLACED} 'ranges_are_as_good or never_less'"),
    bug("expert_placement.py", "    if min(held) != max(held):\n", "    if False:\n", f"{PLACED} no_placement"),
    bug("sharding.py", "self.placement.get(name) or equal_ranges(", "equal_ranges(", f"{PLACED} int4"),
    bug("sharding.py", "        sharding._check_placement()\n        sharding._check_keys(modules)\n", "        sharding._check_keys(modules)\n", f"{PLACED} before_weights"),
    bug("shard_slice.py", "position = index - self.index * size", "position = index", f"{LOADS} 'stored_experts and zeros and expert'"),
    Bug("atomc/loading/load_parts.py", "(expert, first // cut.parts, end // cut.parts)", "(expert, first, first + (end - first) // cut.parts)", f"{LOADS} 'one and width'"),
    Bug("atomc/loading/load_parts.py", "{0: 0, 1: 2, 2: 1}", "{0: 0, 1: 1, 2: 2}", f"{LOADS} transposed"),
    Bug("atomc/quantization/packing.py", "(groups - groups[0]).equal(ordered)", "groups.equal(ordered)", f"{LOADS} gptq"),
    Bug("atomc/capture/dtensors.py", "return result if same else None", "return result", f"{DTENSORS} 'layouts and biases'"),
    Bug("atomc/capture/dtensors.py", "result = self._whole_call(node)\n", "result = None\n", f"{DTENSORS} 'layouts and sum'"),
    Bug("atomc/capture/dtensors.py", " or any(is_dtensor(x) and holds_mask(x) for x in over)", "", f"{DTENSORS} 'computes and parallelize_module'"),
    Bug("atomc/capture/dtensors.py", "        mark_as_parameter(local)\n", "        pass\n", f"{DTENSORS} alone_is_recognized"),
    Bug("atomc/capture/dtensors.py", "local_tensor(x) if is_dtensor(x) else x for x in inputs]", "x for x in inputs]", f"{DTENSORS} takes_and_returns"),
]  # fmt: skip
