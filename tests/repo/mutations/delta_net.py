"""Bugs in models with gated delta nets, and in how classes of transformers are entered."""

from mutations import Bug


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/models/test_delta_net_models.py -k '{tests}'")


NAMES = "logits_and_names"
REFUSED = "no_gated_delta_net"
BUGS = [
    bug("models/gated_delta_net.py", "F.softplus(x.a.float() + layer.dt_bias)", "F.softplus(x.a.float())", NAMES),
    bug("models/gated_delta_net.py", "weighted * F.silu(gate.float())", "weighted * gate.float().sigmoid()", NAMES),
    bug("models/gated_delta_net.py", "(i + 1) % interval == 0", "i % interval == 0", "without_layer_types"),
    bug("models/qwen3_next.py", "[keys, keys, values, values]", "[values, values, keys, keys]", NAMES),
    bug("models/qwen3_next.py", "(out_TNH * gate_TNH.sigmoid())", "(out_TNH * gate_TNH)", NAMES),
    bug("models/qwen3_5.py", "self.in_proj_b(x_TD).sigmoid()", "self.in_proj_b(x_TD)", NAMES),
    bug("models/layers.py", "normed * (1.0 + self.weight.float())", "normed * self.weight.float()", NAMES),
    bug("atomc/stock/replaced_forwards.py", "hidden_states * mask[..., None]", "hidden_states * 1", "padding"),
    bug("atomc/stock/replaced_forwards.py", 'OWN = ("cache", "cache_params", ', "OWN = (", "padding"),
    bug("atomc/stock/delta_net.py", "beta = beta * 2.0", "pass", "wrapped_class and olmo"),
    bug("atomc/stock/replaced_forwards.py", "TOLERANCE = 1e-4", "TOLERANCE = 1e-1", REFUSED),
    bug("atomc/stock/replaced_forwards.py", "dict(small.named_parameters()).keys() - operands", "()", REFUSED),
    bug("atomc/stock/adapter.py", "if num_linear == layer_types.count(LINEAR) + layer_types.count(HYBRID):", "if num_linear:", "without_the_parts"),
    bug("atomc/loading/load_plan.py", "part[0] not in modules", "False", "with_images"),
    bug("atomc/loading/loader.py", 'name.replace("model.language_model.", "model.")', "name", "with_images"),
    bug("atomc/quantization/kept_layers.py", " | _delta_gates(model)", "", "stay_in_16"),
]  # fmt: skip
