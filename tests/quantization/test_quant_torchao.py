"""Layers that torchao quantized become ours, where its layout is one of ours."""

import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc
from atomc.ops.quant import rounded_fp8
from atomc.quantization import QuantizedLinear

E4M3 = torch.float8_e4m3fn
FLOAT8 = "torchao.quantization.quantize_.workflows.float8.float8_tensor"
N, K = 13, 64  # of layers whose inputs have groups


class StandIn(Tensor):
    """As a tensor of torchao: a class with codes, scales and settings as attributes, and operations
    on the values.
    """

    values: Tensor
    attributes: dict[str, Any]

    @staticmethod
    def __new__(cls, values: Tensor, **attributes: Any) -> Any:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        vars(made).update(attributes, values=values, attributes=attributes)
        return made

    def __init__(self, values: Tensor, **attributes: Any) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _: None, size: Any, stride: Any) -> Any:
        return cls(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, **args[0].attributes)
        return func(*[x.values if isinstance(x, StandIn) else x for x in args], **(kwargs or {}))


def stand_in(name: str, values: Tensor, **attributes: Any) -> nn.Parameter:
    kind = type(name, (StandIn,), {"__module__": "torchao.quantization"})
    return nn.Parameter(kind(values, **attributes), requires_grad=False)


class PerRow:
    dim = -1


class PerTensor:
    pass


class PerBlock:
    def __init__(self, *sizes: int) -> None:
        self.block_size = sizes


def int8(rows: int = N, columns: int = 33, **changes: Any) -> nn.Parameter:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scale = torch.rand(rows, 1) + 0.1
    given: dict[str, Any] = {
        "qdata": codes,
        "scale": scale,
        "zero_point": torch.zeros(rows, 1, dtype=torch.int8),
        "block_size": [1, columns],
        "act_quant_kwargs": SimpleNamespace(
            granularity=PerRow(),
            mapping_type=SimpleNamespace(name="SYMMETRIC"),
            reduce_range=False,
        ),
    }
    given |= changes
    return stand_in("Int8Tensor", given["qdata"].float() * given["scale"], **given)


def dynamic(**changes: Any) -> SimpleNamespace:
    settings = {
        "granularity": PerRow(),
        "float8_dtype": E4M3,
        "hp_value_lb": None,
        "hp_value_ub": None,
        "mapping_type": SimpleNamespace(name="SYMMETRIC"),
        "reduce_range": False,
    }
    return SimpleNamespace(**settings | changes)


def fp8(rows: int = N, columns: int = 33, **changes: Any) -> nn.Parameter:
    given: dict[str, Any] = {
        "qdata": rounded_fp8(torch.randn(rows, columns), E4M3),
        "scale": torch.rand(rows, 1) + 0.1,
        "block_size": [1, columns],
        "act_quant_kwargs": dynamic(),
    }
    given |= changes
    scale = given["scale"]
    if list(given["block_size"]) == [128, 128]:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return stand_in("Float8Tensor", given["qdata"].float() * scale, **given)


def int4(**changes: Any) -> nn.Parameter:
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8)
    scale = torch.rand(K // 32, N) + 0.1
    values = codes.float() * scale.t().repeat_interleave(32, 1)
    given = {
        "qdata": (codes[:, ::2] & 15) | (codes[:, 1::2] << 4),
        "scale": scale,
        "zero_point": torch.zeros(K // 32, N),
        "block_size": [1, 32],
        "activation_dtype": torch.bfloat16,
        "act_pre_scale": None,
    }
    return stand_in("Int4Tensor", values, **given | changes)


def intx(**changes: Any) -> nn.Parameter:
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8)
    given: dict[str, Any] = {
        "qdata": codes,
        "scale": torch.rand(N, K // 32) + 0.1,
        "zero_point": torch.zeros(N, K // 32, dtype=torch.int8),
        "block_size": (1, 32),
        "target_dtype": "torch.int4",
        "activation_quantization": None,
    }
    given |= changes
    zeros = given["zero_point"].float().repeat_interleave(32, 1)
    values = (codes.float() - zeros) * given["scale"].repeat_interleave(32, 1)
    return stand_in("IntxUnpackedToInt8Tensor", values, **given)


def layer(weight: nn.Parameter, *, bias: bool = True) -> nn.Sequential:
    """A norm and a linear layer with this weight."""
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=bias)
    linear.weight = weight
    return nn.Sequential(nn.RMSNorm(columns), linear).eval().requires_grad_(False)


INT4_ZEROS = torch.randint(-8, 8, (N, K // 32), dtype=torch.int8)
# (weight, op, largest error relative to the largest result, from quantized activations)
LAYOUTS = [
    (int8(), "scaled_linear_int8", 2e-2),
    (int8(columns=1), "scaled_linear_int8", 2e-2),
    (int8(zero_point=None), "scaled_linear_int8", 2e-2),
    (int8(scale=torch.tensor([[0.3]]), block_size=[N, 33]), "scaled_linear_int8", 2e-2),
    (fp8(), "scaled_linear_fp8", 6e-2),
    (fp8(scale=torch.tensor([[0.3]]), block_size=[N, 33]), "scaled_linear_fp8", 6e-2),
    (
        fp8(
            256,
            384,
            scale=torch.rand(2, 3) + 0.1,
            block_size=[128, 128],
            act_quant_kwargs=dynamic(granularity=PerBlock(1, 128)),
        ),
        "scaled_linear_fp8_block",
        6e-2,
    ),
    (int4(), "linear_w4a16", 1e-5),
    (intx(), "linear_w4a16", 1e-5),
    (intx(zero_point=INT4_ZEROS), "linear_w4a16", 1e-5),
    (intx(zero_point=INT4_ZEROS.float()), "linear_w4a16", 1e-5),
]


@pytest.mark.rotating
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("weight", "op", "limit"), LAYOUTS)
def test_a_layout_of_ours_keeps_its_values(weight: Any, op: str, limit: float, bias: bool) -> None:
    torch.manual_seed(0)
    model, values = layer(weight, bias=bias), weight.values
    x = torch.randn(3, weight.shape[1])
    expected = F.linear(model[0](x), values, model[1].bias)
    assert atomc.adopt(model) is model
    adopted = model[1]
    assert isinstance(adopted, QuantizedLinear)
    assert torch.equal(adopted.dequantized(), values)
    error = (model(x) - expected).abs().max() / expected.abs().max()
    assert error <= limit
    report = atomc.explain(model, x)
    assert report.treated and op in {choice.op for choice in report.kernels}


def test_codes_are_not_copied() -> None:
    weight: Any = int8()
    model = layer(weight)
    assert atomc.adopt(model)[1].weight.data_ptr() == weight.qdata.data_ptr()  # type: ignore[index]


def test_one_scale_of_all_activations_becomes_one_per_row_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = layer(fp8(act_quant_kwargs=dynamic(granularity=PerTensor())))
    with caplog.at_level(logging.WARNING, "atomc"):
        atomc.adopt(model)
    assert [record.message[:53] for record in caplog.records] == [
        "adopt: activations have a dynamic scale per row inste"
    ]


REFUSED = [
    (
        int8(act_quant_kwargs=None),
        "Int8Tensor of torchao has 8-bit weights with 16-bit activations",
    ),
    (fp8(act_quant_kwargs=None), "Float8Tensor of torchao has 8-bit weights with 16-bit activat"),
    (int8(zero_point=torch.ones(N, 1)), "Int8Tensor of torchao has zero points"),
    (int8(act_pre_scale=torch.ones(33)), r"static scales of activations \(act_pre_scale\)"),
    (int8(act_quant_kwargs=dynamic(reduce_range=True)), "or of 7 bits, expected symmetric int8"),
    (
        int8(act_quant_kwargs=dynamic(mapping_type=SimpleNamespace(name="ASYMMETRIC"))),
        "activations that are asymmetric",
    ),
    (int8(act_quant_kwargs=dynamic(granularity=PerBlock(1, 16))), "activations with scales of blo"),
    (
        int8(scale=torch.ones(N, 3), block_size=[1, 11], qdata=torch.ones(N, 3).to(torch.int8)),
        r"scales of blocks \[1, 11\], expected one per output or one",
    ),
    (fp8(qdata=torch.ones(N, 33).to(torch.float8_e5m2)), "float8_e5m2 codes, expected e4m3"),
    (fp8(act_quant_kwargs=dynamic(hp_value_ub=3.0)), "activations that are clamped"),
    (
        fp8(act_quant_kwargs=dynamic(granularity=PerBlock(1, 64))),
        r"scales of blocks \[1, 33\], of activations \[1, 64\], expected \[128, 128\], \[1, 128\]",
    ),
    (
        int4(zero_point=torch.rand(K // 32, N)),
        "Int4Tensor of torchao has zero points that are floa",
    ),
    (int4(activation_dtype=E4M3), "activations that are scaled or quantized, expected 16 bits"),
    (int4(block_size=[1, 16]), r"scales of blocks \[1, 16\], expected groups of 32, 64, 128"),
    (
        intx(target_dtype="torch.int8"),
        "torch.int8 weights with 16-bit activations, expected torch.i",
    ),
    (intx(activation_quantization="x"), "torch.int4 weights with quantized activations"),
    (intx(zero_point=torch.full((N, K // 32), 0.5)), "zero points that are no integers of 4 bits"),
    (intx(zero_point=torch.full((N, K // 32), 8)), "zero points that are no integers of 4 bits"),
    (
        stand_in("Int4TilePackedTo4dTensor", torch.ones(N, K)),
        r"Int4TilePackedTo4dTensor of torchao \[13, 64\] has a layout that atomc does not have, "
        "expected a matrix in Int8Tensor, Float8Tensor, Int4Tensor, IntxUnpackedToInt8Tensor",
    ),
]


@pytest.mark.parametrize(("weight", "reason"), REFUSED)
def test_another_layout_is_refused_by_name_and_changes_nothing(weight: Any, reason: str) -> None:
    model = nn.Sequential(*layer(int8(columns=weight.shape[1])), *layer(weight))
    before = list(model)
    with pytest.raises(ValueError, match=rf"^3: .*{reason}.*; atomc.quantize\(model, scheme\)"):
        atomc.adopt(model)
    assert list(model) == before and before[3].weight is weight


def test_a_layer_that_is_not_linear_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(N, 33))
    model[0].weight = int8()
    with pytest.raises(ValueError, match=r"^0 is of class Embedding, with a weight of torchao's"):
        atomc.adopt(model)


def test_a_weight_that_is_not_adopted_says_how() -> None:
    report = atomc.explain(layer(int8()), torch.randn(3, 33))
    assert (
        "1.weight is a tensor subclass, Int8Tensor of torchao.quantization, which atomc does not "
        "compile: call atomc.adopt(model)"
    ) in report.why("linear")


def test_quantizing_leaves_layers_of_torchao_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*layer(int8()), nn.Linear(N, 5))
    atomc.quantize(model, "int8")
    assert [type(module).__name__ for module in model[1:]] == ["Linear", "QuantizedLinear"]
    assert "layers of type Linear are already quantized and are not changed" in caplog.text


def of_torchao(name: str, dtype: torch.dtype) -> Any:
    """A model that torchao itself quantized."""
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    columns = 64 if "int4" in name else 33
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(columns), nn.Linear(columns, 71)).to(dtype).eval()
    if name.startswith("fp8"):  # its config asserts a GPU
        rows = ao.PerRow() if name == "fp8 rows" else ao.PerTensor()
        settings = {"granularity": rows, "mm_config": ao.Float8MMConfig()}
        how = import_module(FLOAT8).QuantizeTensorToFloat8Kwargs(**settings)
        weight = ao.Float8Tensor.from_hp(model[1].weight.data, act_quant_kwargs=how, **settings)
        model[1].weight = nn.Parameter(weight, requires_grad=False)
    else:
        groups = {"weight_dtype": torch.int4, "granularity": ao.PerGroup(32)}
        config = {
            "int8": ao.Int8DynamicActivationInt8WeightConfig,
            "int4": lambda: ao.IntxWeightOnlyConfig(**groups),
            "int4 zeros": lambda: ao.IntxWeightOnlyConfig(
                **groups, mapping_type=ao.MappingType.ASYMMETRIC
            ),
        }[name]()
        ao.quantize_(model, config)
    return model.requires_grad_(False)


def result_of_torchao(model: nn.Sequential, x: Tensor) -> Tensor:
    try:
        return model(x)
    except RuntimeError as error:
        if "only supports per-tensor scaling for CPU" not in str(error):
            raise
    # torch 2.11 does not multiply fp8 with scales of rows on a CPU.
    norm, linear = model
    settings = vars(linear.weight.act_quant_kwargs)
    codes = type(linear.weight).from_hp(norm(x), granularity=settings["granularity"])
    values = (each.dequantize(torch.float32) for each in (codes, linear.weight))
    return F.linear(*values, linear.bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "fp8 rows", "fp8 tensor", "int4", "int4 zeros"])
def test_what_torchao_quantized_computes_the_same(name: str, dtype: torch.dtype) -> None:
    model = of_torchao(name, dtype)
    x = torch.randn(5, model[1].in_features, dtype=dtype)
    expected, values = result_of_torchao(model, x), model[1].weight.dequantize()
    atomc.adopt(model)
    assert torch.equal(model[1].dequantized().to(dtype), values)
    error = (model(x) - expected).abs().max() / expected.abs().max()
    # A scale per row instead of one; inputs of 16 bits often lie in the middle of two codes.
    is_rounded = name == "fp8 tensor" or (name == "fp8 rows" and dtype == torch.bfloat16)
    assert error <= (5e-2 if is_rounded else 1e-2)
    assert atomc.explain(model, x).treated
