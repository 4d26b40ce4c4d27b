"""LoRA adapters as peft writes them, under torch.compile: their products are one op, and the layers
below merge as without them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes, rewritten, since

import atomc
from atomc import passes
from atomc.quantization import QuantizedLinear
from atomc.rewriting.matching import near_miss

LORA = next(each for each in passes.PIPELINE if each.name == "lora_linear")
X, W, BIAS = torch.randn(3, 16), torch.randn(12, 16) / 4, torch.randn(12)
A, B = torch.randn(2, 16) / 4, torch.randn(12, 2)


def adapted(x, weight, a, b, scale=2.0, bias=None):
    y = F.linear(x, weight, bias)
    return y + F.linear(F.linear(x.to(a.dtype), a), b) * scale


def test_the_products_of_an_adapter_become_one_op():
    assert (
        rewritten(LORA, adapted, X, W, A, B)
        == """\
%0 = linear(x, weight)
%1 = permute(b, [1, 0])
%2 = unsqueeze(a, 0)
%3 = unsqueeze(%1, 0)
%4 = lora_linear(%0, x, %2, %3, scale=2.0)
return %4"""
    )


def in_fp32(x, weight, a, b):
    return adapted(x, weight, a, b).to(x.dtype)


def test_an_adapter_in_fp32_of_a_layer_in_16_bits_is_one_too():
    x, weight = X.bfloat16(), W.bfloat16()
    assert "lora_linear" in rewritten(LORA, in_fp32, x, weight, A, B)
    rewritten(LORA, adapted, x, weight, A, B, matches=0)  # the sum stays in fp32


@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
def test_a_scale_of_1_is_recognized_by_the_layer_it_is_added_to(bias):
    def unscaled(x, weight, a, b):
        return adapted(x, weight, a, b, 1.0, bias)

    assert "lora_linear" in rewritten(LORA, unscaled, X, W, A, B)

    def residual(x, a, b):
        return x.sin() + F.linear(F.linear(x, a), b)

    rewritten(LORA, residual, X, A, torch.randn(16, 2), matches=0)


def missed(function, *inputs):
    """(expected, found) of the near miss in a function."""
    [miss] = after_passes([LORA], function, *inputs).report.misses("lora_linear")
    return miss.expected, miss.found


def dropped(x, weight, a, b):
    """Dropout that is active, with the same numbers in each call."""
    mask = (torch.arange(16) % 2).to(x.dtype) * 2
    y = F.linear(x, weight)
    return y + F.linear(F.linear(x, a) * mask[:2], b) * 2.0


def with_magnitudes(x, weight, a, b):
    """DoRA: the sum is scaled by column."""
    magnitude = (weight + 2.0 * b @ a).norm(dim=1)
    return F.linear(x, weight) + magnitude * F.linear(F.linear(x, a), b) * 2.0


def test_what_keeps_an_adapter_from_being_recognized_is_named():
    expected, found = missed(dropped, X, W, A, B)
    assert expected.startswith("linear reading linear") and found.startswith("mul")
    expected, found = missed(with_magnitudes, X, W, A, B)
    assert expected.startswith("mul reading linear") and found.startswith("mul")


@pytest.mark.rotating
def test_products_that_are_no_adapter_are_left_alone():
    wide = torch.randn(16, 16), torch.randn(12, 16)
    assert (
        missed(adapted, X, W, *wide)[1] == "its rank 16 is not below its 16 inputs and 12 outputs"
    )

    rewritten(LORA, adapted, X, W, A, B, matches=0, dynamic=True)

    def read_twice(x, weight, a, b):
        thin = F.linear(x, a)
        return F.linear(x, weight) + F.linear(thin, b) * 2.0, thin

    rewritten(LORA, read_twice, X, W, A, B, matches=0)


def test_the_layers_of_a_model_without_adapters_are_compared_with_no_pattern(monkeypatch):
    compared = []
    explain = near_miss.explain
    monkeypatch.setattr(near_miss, "explain", lambda *args: compared.append(args) or explain(*args))

    def mlp(x, weight, back):
        return x + F.linear(F.silu(F.linear(x, weight)), back)

    rewritten(LORA, mlp, X, W, torch.randn(16, 12), matches=0)
    assert not compared
    missed(dropped, X, W, A, B)
    assert compared


class Adapted(torch.nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = torch.nn.Linear(inputs, outputs, bias=False)
        self.lora_a = torch.nn.Linear(inputs, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x)) * 2.0


class GatedMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = Adapted(16, 24), Adapted(16, 24)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


def test_gate_and_up_below_adapters_are_merged():
    report = compiled(GatedMLP().eval().requires_grad_(False), X)
    assert report.matches["lora_linear"] == 2
    assert [report.matches[name] for name in MERGES] == [0, 1, 0]


MERGES = ("merge_qkv", "merge_gate_up", "merge_linears")


def wrapped(dtype):
    """A small model with adapters, and what transformers and peft compute."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="it wraps the model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    model = transformers.Qwen3ForCausalLM(config).to(dtype)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
    return peft.get_peft_model(model, lora).eval().requires_grad_(False)


def compiled(model, *inputs, **more):
    """The report of the compiled model, which is one graph with the results of eager."""
    before = atomc.reports()
    with torch.inference_mode():
        expected = model(*inputs, **more)
        call = torch.compile(model, backend="atom", options={"glue": "eager", "strict": True})
        torch.testing.assert_close(call(*inputs, **more), expected)
    (report,) = since(before)
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "adapters in fp32"])
def test_layers_below_adapters_of_peft_merge_as_without_them(dtype):
    report = compiled(wrapped(dtype), torch.tensor([[3, 1, 4, 1, 5]]), use_cache=False)
    assert report.matches["lora_linear"] == 7
    assert [report.matches[name] for name in MERGES] == [1, 1, 0]


IDS = torch.tensor([[3, 1, 4, 1, 5]])


def dequantized(model):
    """A copy whose quantized layers have become linear layers with the same values."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight = torch.nn.Parameter(layer.dequantized(), requires_grad=False)
            model.set_submodule(name, plain)
    return model


@pytest.mark.parametrize(
    "scheme, bound",
    [
        ("fp8", 0.1),
        pytest.param("int8", 0.03, marks=pytest.mark.slow),
        pytest.param("int4", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_peft_over_quantized_layers_are_one_op_each_and_the_layers_merge(scheme, bound):
    """Activations have 8 bits, too, in fp8 and int8: the bounds."""
    model = atomc.quantize(wrapped(torch.float32), scheme)
    layers = {name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(layers) == 7 and {name.rpartition(".")[2] for name in layers} == {"base_layer"}
    report = compiled(model, IDS, use_cache=False)
    assert report.matches["lora_linear"] == 7
    assert [report.matches[name] for name in MERGES] == [1, 1, 0]
    found, exact = (each(IDS, use_cache=False).logits for each in (model, dequantized(model)))
    assert (found - exact).norm() <= bound * exact.norm()


def test_names_of_layers_to_ignore_are_those_of_the_model_without_adapters():
    model = atomc.quantize(wrapped(torch.float32), "int8", ["mlp.gate_up_proj", r"re:.*[qk]_proj$"])
    names = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)]
    assert [name.split(".")[-2] for name in names] == ["v_proj", "o_proj", "down_proj"]


class Wrapper(torch.nn.Module):
    """A linear layer with an adapter, with the names that peft gives both."""

    def __init__(self, inputs, outputs, scale):
        super().__init__()
        self.base_layer = torch.nn.Linear(inputs, outputs, bias=False)
        thin = torch.nn.Linear(inputs, 2, bias=False), torch.nn.Linear(2, outputs, bias=False)
        self.lora_A, self.lora_B = (torch.nn.ModuleDict({"default": layer}) for layer in thin)
        self.scale = scale

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scale


PER_CHANGE = {("fp8", 1.0), ("int4", 2.0)}


class Block(torch.nn.Module):
    """A gated MLP; only one of the two layers that are merged has an adapter."""

    def __init__(self, scale):
        super().__init__()
        self.gate_proj = Wrapper(64, 96, scale)
        self.up_proj = torch.nn.Linear(64, 96, bias=False)

    def forward(self, x):
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


@pytest.mark.parametrize(
    "scheme, scale",
    [
        pytest.param(scheme, scale, marks=() if (scheme, scale) in PER_CHANGE else pytest.mark.slow)
        for scheme in ("fp8", "int8", "int4", "mxfp4", "nvfp4_a16")
        for scale in (2.0, 1.0)
    ],
)
def test_an_adapter_of_one_of_two_quantized_layers_does_not_keep_them_apart(scheme, scale):
    torch.manual_seed(0)
    model = Block(scale).eval().requires_grad_(False)
    atomc.quantize(model, scheme)
    names = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)]
    assert names == ["gate_proj.base_layer", "up_proj"]
    if scheme == "fp8":  # one scale, or the products could not be merged
        assert model.gate_proj.base_layer.weight_scale is model.up_proj.weight_scale
    report = compiled(model, torch.randn(3, 64))
    assert report.matches["lora_linear"] == 1
    assert [report.matches[name] for name in MERGES] == [0, 1, 0]
