"""Quantized experts: what each scheme computes, models that are quantized in a program and while
loading, and their graphs.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experts import CONFIGS, IDS, POSITIONS, random_model, sqnr, stored, write
from torch import Tensor, nn

import atomc
from atomc import ops
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.models.experts import Experts
from atomc.models.gpt_oss import GptOssExperts
from atomc.planning.device_model import build_model
from atomc.quantization import ONLINE, QuantizedExperts, QuantizedLinear, apply, quantize
from atomc.quantization.config import online, parse
from atomc.quantization.experts import STACKED, ExpertsMethod
from atomc.quantization.experts_spec import spec_of
from atomc.quantization.scheme import Fp8, Int4, Mxfp4, Scheme

transformers = pytest.importorskip("transformers")

T, E, K, H, I = 9, 4, 2, 128, 96  # noqa: E741
BIASES = ("gate_up_proj_bias", "down_proj_bias")
SCHEMES: dict[str, Scheme] = {
    name: scheme for name, scheme in ONLINE.items() if name != "nvfp4_a16"
} | {
    "mxfp4 with fp8": Mxfp4("fp8"),
    "fp8 static": Fp8("tensor", "static"),
    "int4 in groups of 64": Int4(64),
}
# Decibels that the logits of random models keep: less than the dense ones, since some tokens get
# other experts.
KEEPS = {
    "fp8": 20,
    "fp8_per_token": 20,
    "fp8_block": 20,
    "int8": 28,
    "int4": 12,
    "mxfp4": 9,
    "mxfp4_a16": 11,
}


def experts(kind: str = "silu", num_experts: int = E, width: int = I) -> nn.Module:
    """The experts of our Qwen3-MoE, or of our GPT-OSS."""
    torch.manual_seed(0)
    made = Experts(num_experts, H, width)
    if kind == "gpt_oss":
        made = GptOssExperts.__new__(GptOssExperts)
        Experts.__init__(made, num_experts, H, width)
        made.alpha, made.limit = 1.5, 2.0
        made.gate_up_proj_bias = nn.Parameter(torch.randn(num_experts, 2 * width))
        made.down_proj_bias = nn.Parameter(torch.randn(num_experts, H))
    for name in STACKED:
        weight = made.get_parameter(name).data
        weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    return made.requires_grad_(False)


def calls(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=generator)
    ids = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
    return x, ids, torch.rand(tokens, K, generator=generator)


def quantized_experts(scheme: Scheme, kind: str = "silu", width: int = I) -> QuantizedExperts:
    model = nn.ModuleDict({"experts": experts(kind, width=width)})
    apply.quantize_experts(model, "experts", ExpertsMethod(scheme))
    made = model["experts"]
    assert isinstance(made, QuantizedExperts)
    if scheme == SCHEMES["fp8 static"]:
        made.set("gate_up_proj_input_scale", torch.tensor([0.01]))
        made.set("down_proj_input_scale", torch.tensor([0.05]))
    return made


# What a scheme computes


@pytest.mark.parametrize("kind", ["silu", "gpt_oss"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_experts_multiply_by_their_dequantized_weights(scheme: Scheme, kind: str) -> None:
    """Only activations are rounded beyond that."""
    made = quantized_experts(scheme, kind, width=64 if scheme == Int4(64) else I)
    x, ids, weights = calls()
    exact = ops.moe_experts(
        x,
        ids,
        weights,
        made.dequantized("gate_up_proj"),
        made.dequantized("down_proj"),
        made.gate_up_proj_bias,
        made.down_proj_bias,
        **made.gate,
    )
    out = made(x, ids, weights)
    assert out.dtype == x.dtype and out.shape == x.shape
    few_bits = isinstance(scheme, Mxfp4) and scheme.activation == "mxfp4"
    sixteen = isinstance(scheme, Int4) or scheme == Mxfp4("16-bit")
    assert sqnr(exact, out) > (100 if sixteen else 12 if few_bits else 25)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4", "mxfp4_a16"])
def test_each_expert_is_quantized_by_itself(scheme: str) -> None:
    plain = experts()
    plain.get_parameter("gate_up_proj").data[1] *= 1000
    originals = {name: plain.get_parameter(name).clone() for name in STACKED}
    model = nn.ModuleDict({"experts": plain})
    apply.quantize_experts(model, "experts", ExpertsMethod(ONLINE[scheme]))
    for name in STACKED:
        for exact, found in zip(originals[name], model["experts"].dequantized(name), strict=True):
            assert sqnr(exact, found) > (15 if scheme in ("int4", "mxfp4_a16") else 25)


def test_codes_and_scales_keep_their_dtype_and_biases_do_not() -> None:
    made = quantized_experts(ONLINE["fp8"], "gpt_oss").to(torch.bfloat16)
    assert made.gate_up_proj.dtype == torch.float8_e4m3fn
    assert made.gate_up_proj_scale.dtype == torch.float32
    assert made.down_proj_bias is not None and made.down_proj_bias.dtype == torch.bfloat16


# Which experts there are


def config_of(kind: str) -> dict[str, Any]:
    return {name: x for name, x in CONFIGS[kind].items() if name != "model_type"}


def stock_experts(kind: str, **differs: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **(config_of(kind) | differs))
    cls = {"gpt_oss": "GptOssExperts", "mixtral": "MixtralExperts", "qwen3_moe": "Qwen3MoeExperts"}
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=[cls[kind]])
    made: nn.Module = getattr(module, cls[kind])(config)
    return made


@pytest.mark.parametrize(
    ("kind", "differs", "gate"),
    [
        ("qwen3_moe", {}, ("silu", False, None)),
        ("mixtral", {"hidden_act": "gelu"}, ("gelu", False, None)),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, ("gelu_tanh", False, None)),
        ("gpt_oss", {"swiglu_limit": 3.0}, ("swiglu_oai", True, 3.0)),
    ],
)
def test_the_gate_is_found_by_what_it_computes(
    kind: str, differs: dict[str, Any], gate: tuple[str, bool, float | None]
) -> None:
    experts = stock_experts(kind, **differs)
    if "swiglu_limit" in differs:  # a constant in transformers 5.17
        experts.limit = differs["swiglu_limit"]
    found = spec_of(experts)
    assert (found.gate["activation"], found.gate["interleaved"], found.gate["limit"]) == gate
    assert found.has_bias == found.transposed == (kind == "gpt_oss")
    assert (found.num_experts, found.hidden_size, found.intermediate_size) == (4, 128, 64)


def test_a_clamp_behind_the_activation_is_another_gate() -> None:
    made = stock_experts("qwen3_moe")
    clamped = type("Clamped", (type(made),), {"limit": 1.0})
    clamped._apply_gate = lambda self, h: (  # type: ignore[attr-defined]
        self.act_fn(h.chunk(2, -1)[0]).clamp(max=1.0) * h.chunk(2, -1)[1].clamp(-1.0, 1.0)
    )
    made.__class__ = clamped
    with pytest.raises(ValueError, match=r"the gate of Clamped \(activation SiLU"):
        spec_of(made)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "the gate of MixtralExperts \\(activation ReLU.*\\) is another"),
        ({"has_post_expert_norm": True}, "MixtralExperts has a norm after each expert"),
        ({"gate_up_proj": None}, "MixtralExperts has no gate"),
        ({"is_concatenated": None}, "not one of the classes whose experts transformers lets"),
    ],
)
def test_experts_that_no_op_computes_are_refused_by_name(
    changes: dict[str, Any], reason: str
) -> None:
    made = stock_experts("mixtral", hidden_act=changes.get("hidden_act", "silu"))
    if "gate_up_proj" in changes:
        made.up_proj = made.gate_up_proj
        del made.gate_up_proj
    if "is_concatenated" in changes:
        del made.is_concatenated
    made.has_post_expert_norm = "has_post_expert_norm" in changes
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": made})})
    with pytest.raises(ValueError, match=rf"fp8: mlp.experts cannot be fp8 .*{reason}.*`ignore`"):
        quantize(model, "fp8")


def test_experts_that_the_scheme_cannot_store_are_named() -> None:
    model = random_model("qwen3_moe", moe_intermediate_size=48)
    with pytest.raises(ValueError, match=r"int4: model.layers.0.mlp.experts cannot be int4.*48"):
        quantize(model, "int4")
    quantize(model, "int4", ignore=["experts"])
    assert type(model.get_submodule("model.layers.0.mlp.experts")) is Experts


def test_a_pattern_for_some_projections_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts has .* \(ignored are down_proj\)"):
        quantize(random_model("mixtral"), "fp8", ignore=["down_proj"])


# Models


def stock_model(kind: str, path: Path) -> nn.Module:
    """The class of transformers, with the weights of random_model."""
    cls = getattr(transformers, CONFIGS[kind]["architectures"][0])
    write(path, kind, stored(random_model(kind)))
    model: nn.Module = cls.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.requires_grad_(False).eval()


def logits(model: nn.Module) -> Tensor:
    if hasattr(model, "generate"):
        found: Tensor = model(input_ids=IDS[None], use_cache=False).logits[0]
        return found
    out: Tensor = model(IDS, POSITIONS)
    return out


@pytest.mark.parametrize("whose", ["ours", "stock"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_mixture_is_close_to_the_model(kind: str, whose: str, tmp_path: Path) -> None:
    plain = random_model(kind) if whose == "ours" else stock_model(kind, tmp_path)
    exact = logits(plain)
    state = {name: x.clone() for name, x in plain.state_dict().items()}
    for scheme, keeps in KEEPS.items():
        model = random_model(kind) if whose == "ours" else type(plain)(plain.config).eval()
        model.load_state_dict(state)
        quantize(model.requires_grad_(False), scheme)
        assert keeps < sqnr(exact, logits(model)) < 70, scheme
        assert [type(x) for name, x in model.named_modules() if name.endswith("experts")] == [
            QuantizedExperts
        ] * 2


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_stock_experts_become_the_codes_of_ours(kind: str, tmp_path: Path) -> None:
    ours = quantize(random_model(kind), "int8").get_submodule("model.layers.1.mlp.experts")
    stock = quantize(stock_model(kind, tmp_path), "int8").get_submodule(
        "model.layers.1.mlp.experts"
    )
    assert sorted(ours.state_dict()) == sorted(stock.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, stock.state_dict()[name]), name


def test_routers_and_the_gate_of_shared_experts_keep_16_bits() -> None:
    config = transformers.AutoConfig.for_model(
        "qwen2_moe",
        **config_of("qwen3_moe") | {"shared_expert_intermediate_size": 64},
    )
    model = quantize(transformers.Qwen2MoeForCausalLM(config), "fp8")
    block = model.get_submodule("model.layers.0.mlp")
    assert type(block.get_submodule("shared_expert_gate")) is nn.Linear
    assert type(block.get_submodule("shared_expert.up_proj")) is QuantizedLinear
    assert type(block.get_submodule("experts")) is QuantizedExperts


def test_a_linear_router_within_a_mixture_keeps_16_bits_and_a_gate_elsewhere_does_not() -> None:
    def linear() -> nn.Linear:
        return nn.Linear(H, H)

    block = nn.ModuleDict({"experts": experts(), "router": nn.ModuleDict({"layer": linear()})})
    model = nn.ModuleDict({"moe": block, "dense": nn.ModuleDict({"gate": linear()})})
    quantize(model, "fp8")
    kinds = {name: type(layer) for name, layer in model.named_modules()}
    assert kinds["moe.router.layer"] is nn.Linear
    assert kinds["dense.gate"] is QuantizedLinear


def test_quantized_experts_are_not_quantized_again(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("qwen3_moe")
    apply.quantize_experts(model, "model.layers.0.mlp.experts", ExpertsMethod(ONLINE["int8"]))
    quantize(model, "fp8")
    first = model.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(first, QuantizedExperts) and first.gate_up_proj.dtype == torch.int8


# While loading


@pytest.mark.parametrize("per_expert", [False, True], ids=["stacked", "per expert"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_quantizing_while_loading_is_quantizing_afterwards(
    kind: str, per_expert: bool, tmp_path: Path
) -> None:
    if per_expert and kind == "gpt_oss":
        pytest.skip("no checkpoint of GPT-OSS has its experts apart")
    tensors = stored(random_model(kind))
    write(tmp_path, kind, apart(tensors) if per_expert else tensors)
    for scheme in ("fp8", "int4"):
        streamed = load(tmp_path, quantization=scheme, progress=False)
        afterwards = quantize(load(tmp_path, progress=False), scheme)
        assert torch.equal(streamed(IDS, POSITIONS), afterwards(IDS, POSITIONS))
        found = [name for name, _ in apply.quantized_experts(streamed)]
        assert found == [f"model.layers.{i}.mlp.experts" for i in range(2)]
        assert not any(tensor.is_meta for tensor in streamed.state_dict().values())


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a tensor per expert and projection, as transformers 4 stores them."""
    found = {}
    for name, weight in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for e, (gate, up) in enumerate(w.chunk(2) for w in weight):
                found |= {f"{owner}.{e}.w1.weight": gate, f"{owner}.{e}.w3.weight": up}
        elif leaf == "down_proj" and weight.dim() == 3:
            found |= {f"{owner}.{e}.w2.weight": w for e, w in enumerate(weight)}
        else:
            found[name] = weight
    return found


def test_experts_of_random_weights_are_quantized_as_well(tmp_path: Path) -> None:
    write(tmp_path, "gpt_oss", {}, {"quant_method": "mxfp4"})
    for how in ({}, {"quantization": "fp8"}):
        if how:
            write(tmp_path, "gpt_oss", {})
        model = load(tmp_path, load_format="dummy", progress=False, **how)
        assert len(list(apply.quantized_experts(model))) == 2
        assert model(IDS, POSITIONS).isfinite().all()


@pytest.mark.rotating
def test_one_layer_of_experts_is_unquantized_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        "mixtral",
        stored(random_model("mixtral", num_hidden_layers=4)),
        num_hidden_layers=4,
    )
    seen, quantize_experts = [], apply.quantize_experts

    def watched(model: nn.Module, name: str, method: ExpertsMethod) -> None:
        gc.collect()
        held = [
            path
            for path, module in model.named_modules()
            if isinstance(module, Experts) and not module.down_proj.is_meta
        ]
        seen.append(held)
        quantize_experts(model, name, method)

    monkeypatch.setattr(apply, "quantize_experts", watched)
    load(tmp_path, quantization="fp8", progress=False)
    assert seen == [[f"model.layers.{i}.mlp.experts"] for i in range(4)]


def test_the_16_bit_weights_are_freed_projection_by_projection() -> None:
    model = nn.ModuleDict({"experts": experts()})
    plain = model["experts"]
    apply.quantize_experts(model, "experts", ExpertsMethod(ONLINE["fp8"]))
    assert not set(plain._parameters) & set(STACKED)


def test_a_plan_has_quantized_experts(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", {})
    planned = build_model(tmp_path, quantization="int8").module
    found = planned.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(found, QuantizedExperts) and found.gate_up_proj.is_meta
    assert found.gate_up_proj.shape == (4, 128, 128) and found.gate_up_proj_scale.numel() == 512


# Configs

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("ignored", "is_quantized"),
    [
        ([], True),
        (["re:.*mlp.gate$", "lm_head", "re:.*router.*"], True),
        (["model.layers.1"], True),
        (["model.layers.0"], False),
        (["mlp.experts"], False),
        (["re:.*mlp.experts.*"], False),
        (["re:.*experts.*gate_up_proj", "re:.*down_proj"], False),
        (["Linear"], False),
    ],
)
def test_ignore_lists_name_experts_by_module_or_projections(
    ignored: list[str], is_quantized: bool
) -> None:
    config = parse(BLOCKS | {"modules_to_not_convert": ignored})
    found = config.get_experts_method(experts(), "model.layers.0.mlp.experts")
    assert (found is not None) == is_quantized
    again = online("fp8", ignored).get_experts_method(experts(), "model.layers.0.mlp.experts")
    assert (again is not None) == is_quantized


def test_mxfp4_of_gpt_oss_is_for_experts_alone() -> None:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config = parse({"quant_method": "mxfp4", "modules_to_not_convert": kept})
    found = config.get_experts_method(experts("gpt_oss"), "model.layers.0.mlp.experts")
    assert found == ExpertsMethod(Mxfp4("16-bit"))
    assert config.get_quant_method(nn.Linear(H, H), "model.layers.0.self_attn.q_proj") is None


# Graphs

QUANTIZERS = {"fp8": "fp8_per_token", "fp8_block": "fp8_group", "int8": "int8_per_token"}
OPS = {"fp8": "moe_experts_fp8", "fp8_block": "moe_experts_fp8", "int8": "moe_experts_int8"}


def bf16_model(kind: str, layers: int, whose: str) -> nn.Module:
    config = CONFIGS[kind] | {"num_hidden_layers": layers}
    if whose == "ours":
        model = create_model(config, torch.bfloat16, "cpu")
    else:
        cls = getattr(transformers, config["architectures"][0])
        model = cls(cls.config_class.from_dict(config)).to(torch.bfloat16)
    return model.eval().requires_grad_(False)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "whose", "layers", "scheme", "dynamic"),
    [
        ("qwen3_moe", "ours", 1, "fp8_block", True),
        ("qwen3_moe", "stock", 2, "fp8", False),
        ("mixtral", "ours", 1, "int8", True),
        pytest.param("mixtral", "ours", 4, "int8", False, marks=pytest.mark.slow),
        *(
            pytest.param("qwen3_moe", "ours", layers, "fp8", dynamic, marks=pytest.mark.slow)
            for layers in (1, 2, 4)
            for dynamic in (False, True)
        ),
    ],
)
def test_norms_quantize_for_experts_as_for_linear_layers(
    kind: str, whose: str, layers: int, scheme: str, dynamic: bool
) -> None:
    """Each layer has two norms, and quantizes for q, k, v, behind attention (which stays apart),
    and for its experts.
    """
    model = quantize(bf16_model(kind, layers, whose), scheme)
    report = atomc.explain(model, options={"strict": True, "glue": "eager"}, dynamic=dynamic)
    quantizer = QUANTIZERS[scheme]
    fired = {name: report.matches.get(name, 0) for name in ("add_rms_norm_quant", "rms_norm_quant")}
    assert fired == {"add_rms_norm_quant": 2 * layers - 1, "rms_norm_quant": 1}
    assert report.num_ops[OPS[scheme]] == layers
    assert report.num_ops[f"quant_{quantizer}"] == layers


def test_16_bit_activations_reach_the_experts_as_they_are() -> None:
    model = quantize(bf16_model("gpt_oss", 1, "ours"), "mxfp4_a16")
    report = atomc.explain(model, options={"strict": True, "glue": "eager"})
    assert report.num_ops["moe_experts_mxfp4"] == 1
    assert not any("quant" in name for name in report.num_ops)


@pytest.mark.parametrize("kind", ["gpt_oss"])
def test_compiled_experts_are_the_eager_ones(kind: str, tmp_path: Path) -> None:
    model = quantize(stock_model(kind, tmp_path), "fp8")
    eager = logits(model)
    options = {"strict": True, "glue": "eager"}
    compiled = torch.compile(model, backend="atom", options=options, fullgraph=True)
    assert sqnr(eager, compiled(input_ids=IDS[None], use_cache=False).logits[0]) > 30
