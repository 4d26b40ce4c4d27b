"""Small example arguments for each op, to run a kernel without a model. Sizes are those of
random_inputs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import NVFP4_GROUP
from atomc.ops.schemes import SCHEMES
from atomc.testing.random_inputs import (
    CHOSEN,
    EPS,
    EXPERTS,
    Arguments,
    D,
    Examples,
    M,
    P,
    Quantizer,
    R,
    RandomInputs,
)
from atomc.testing.sequence_examples import SEQUENCE_EXAMPLES


def _normed(n: RandomInputs, residual: bool = False, **more: int | str) -> Arguments:
    arguments: Arguments = {"x": n(n.T, D), "weight": n(D), "eps": EPS, **more}
    return arguments | ({"residual": n(n.T, D)} if residual else {})


def _normed_sum(n: RandomInputs, style: str = "after") -> Arguments:
    return {
        "x": n(n.T, D),
        "residual": n(n.T, D),
        "x_weight": n(D),
        "sum_weight": n(D),
        "x_eps": EPS,
        "sum_eps": EPS,
        "x_style": style,
        "sum_style": style,
    }


def _layer_normed(n: RandomInputs, residual: bool = False) -> Arguments:
    return _normed(n, residual) | {"bias": n(D)}


def _gated(n: RandomInputs, **more: str) -> Arguments:
    gate, up = n(n.T, 2 * M).chunk(2, -1)
    return {"gate": gate, "up": up, **more}


def _static_scale(scheme: str, n: RandomInputs) -> Tensor | None:
    return torch.tensor([0.02], device=n.device) if scheme == "fp8_static" else None


def _quantizing(
    make: Callable[[RandomInputs], Arguments], scheme: str, n: RandomInputs
) -> Arguments:
    return make(n) | {"scheme": scheme, "scale": _static_scale(scheme, n)}


def _normed_pair(n: RandomInputs) -> Arguments:
    x, y = torch.split(n(n.T, D + M), [D, M], -1)
    return {"x": x, "y": y, "x_weight": n(D), "y_weight": n(M), "eps": EPS}


def _quantized_pair(scheme: str, n: RandomInputs, **more: bool) -> Arguments:
    scale = _static_scale(scheme, n)
    return _normed_pair(n) | {"scheme": scheme, "x_scale": scale, "y_scale": scale, **more}


def _linear(n: RandomInputs) -> Arguments:
    return {"x": n(n.T, D), "weight": n(M, D) / 16}


def _linear_gated(activation: str, n: RandomInputs) -> Arguments:
    return _linear(n) | {"bias": n(M), "activation": activation}


def _lora(n: RandomInputs) -> Arguments:
    return {
        "y": n(n.T, M),
        "x": n(n.T, D),
        "a": n(3, 2 * P, D) / 16,
        "b": n(3, P, M) / 16,
        "rows": n.below(4, n.T, dtype=torch.int32) - 1,
        "widths": [M // 2, M // 2],
    }


def _code_inputs(op: Quantizer, n: RandomInputs) -> Arguments:
    x, x_scale = n.quantized(op, n.T, D)
    weight, weight_scale = n.quantized(op, M, D)
    return {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "out_dtype": n.dtype,
    }


def _blocks(n: RandomInputs) -> Arguments:
    scales = n(M // 128, D // 128, dtype=torch.float32).abs() / 20
    return _code_inputs(ops.quant_fp8_group, n) | {"weight_scale": scales}


def _w4a16(n: RandomInputs) -> Arguments:
    codes = n.below(2**31 - 1, M, D // 8, dtype=torch.int32)
    return {"x": n(n.T, D), "weight": codes, "weight_scale": n(M, D // 32).abs() / 50, "group": 32}


def _mxfp4_a16(n: RandomInputs) -> Arguments:
    weight, scale = n.quantized(ops.quant_mxfp4, M, D)
    return {"x": n(n.T, D), "weight": weight, "weight_scale": scale, "out_dtype": n.dtype}


def _nvfp4_a16(n: RandomInputs) -> Arguments:
    return {
        "x": n(n.T, D),
        "weight": n.below(256, M, D // 2, dtype=torch.uint8),
        "weight_scale": n(M, D // NVFP4_GROUP).abs().to(torch.float8_e4m3fn),
        "global_scale": n(M, 1, dtype=torch.float32).abs() / 50,
    }


def _routed(n: RandomInputs) -> Arguments:
    weights = n(n.T, CHOSEN, dtype=torch.float32).softmax(-1)
    return {"ids": n.below(EXPERTS, n.T, CHOSEN, dtype=torch.int32), "weights": weights}


def _experts(n: RandomInputs) -> Arguments:
    weights = {"w13": n(EXPERTS, 2 * M, D) / 16, "w2": n(EXPERTS, D, M) / 16}
    return {"x": n(n.T, D), **_routed(n), **weights}


def _experts_of_codes(op: Quantizer, n: RandomInputs) -> Arguments:
    x, x_scale = n.quantized(op, n.T, D)
    w13, w13_scale = n.quantized(op, EXPERTS, 2 * M, D)
    w2, w2_scale = n.quantized(op, EXPERTS, D, M)
    scales: Arguments = {"x_scale": x_scale, "w13_scale": w13_scale, "w2_scale": w2_scale}
    return {"x": x, **_routed(n), "w13": w13, "w2": w2, **scales, "out_dtype": n.dtype}


def _experts_of_blocks(n: RandomInputs) -> Arguments:
    w13 = n(EXPERTS, 2 * M // 128, D // 128, dtype=torch.float32).abs() / 20
    w2 = n(EXPERTS, D // 128, M // 128, dtype=torch.float32).abs() / 20
    codes = _experts_of_codes(ops.quant_fp8_group, n)
    return codes | {"w13_scale": w13, "w2_scale": w2, "block": 128}


def _experts_w4a16(n: RandomInputs) -> Arguments:
    arguments: Arguments = {"x": n(n.T, D), **_routed(n), "group": 32}
    for name, rows, columns in (("w13", 2 * M, D), ("w2", D, M)):
        arguments[name] = n.below(2**31 - 1, EXPERTS, rows, columns // 8, dtype=torch.int32)
        arguments[f"{name}_scale"] = n(EXPERTS, rows, columns // 32).abs() / 50
    return arguments


def _experts_mxfp4(n: RandomInputs) -> Arguments:
    codes = _experts_of_codes(ops.quant_mxfp4, n)
    return codes | {"x": n(n.T, D), "x_scale": None}


def _keys_and_values(n: RandomInputs) -> Arguments:
    """The rows of each head have P columns of the key and P of the value."""
    return _code_inputs(ops.quant_fp8_per_token, n) | {
        "k_pe": n(n.T, M // (2 * P), R),
        "nope": P,
        "scheme": "fp8",
    }


EXAMPLES: Examples = {
    ops.silu_and_mul: {"": _gated},
    ops.sigmoid_and_mul: {"": _gated, "added": lambda n: _gated(n) | {"added": n(n.T, M)}},
    ops.gelu_and_mul: {"": _gated, "tanh": partial(_gated, approximate="tanh")},
    ops.rms_norm: {"": _normed, "one_plus": partial(_normed, style="one_plus")},
    ops.add_rms_norm: {
        "": partial(_normed, residual=True),
        "one_plus": partial(_normed, residual=True, style="one_plus"),
    },
    ops.rms_norm_add: {"": partial(_normed, residual=True)},
    ops.rms_norm_add_rms_norm: {
        "": _normed_sum,
        "one_plus": partial(_normed_sum, style="one_plus"),
    },
    ops.layer_norm: {"": _layer_normed},
    ops.add_layer_norm: {"": partial(_layer_normed, residual=True)},
    ops.add_rms_norm_pad: {"": partial(_normed, residual=True, columns=64)},
    ops.rms_norm_quant: {scheme: partial(_quantizing, _normed, scheme) for scheme in SCHEMES},
    ops.add_rms_norm_quant: {
        scheme: partial(_quantizing, partial(_normed, residual=True), scheme) for scheme in SCHEMES
    },
    ops.rms_norm_gated: {"": lambda n: _normed(n) | {"gate": n(n.T, D)}},
    ops.rms_norm_pair: {"": _normed_pair},
    ops.rms_norm_pair_quant: {
        **{scheme: partial(_quantized_pair, scheme) for scheme in SCHEMES},
        "one of them": partial(_quantized_pair, "fp8_group", quantize_y=False),
    },
    ops.silu_and_mul_quant: {scheme: partial(_quantizing, _gated, scheme) for scheme in SCHEMES},
    ops.quant_fp8_static: {"": lambda n: {"x": n(n.T, D), "scale": _static_scale("fp8_static", n)}},
    ops.quant_fp8_per_token: {"": lambda n: {"x": n(n.T, D)}},
    ops.quant_fp8_group: {"": lambda n: {"x": n(n.T, D)}},
    ops.quant_int8_per_token: {"": lambda n: {"x": n(n.T, D)}},
    ops.quant_mxfp4: {"": lambda n: {"x": n(n.T, D)}},
    ops.count_experts: {
        "": lambda n: {
            "ids": n.below(EXPERTS, n.T, CHOSEN, dtype=torch.int32),
            "slots": n.slots(),
            "counts": n.below(1000, EXPERTS),
        },
    },
    ops.topk_route: {
        "": lambda n: {"logits": n(n.T, 64), "k": CHOSEN, "renormalize": True},
    },
    ops.linear_topk_route: {
        "": lambda n: {
            "x": n(n.T, D),
            "weight": n(64, D) / 16,
            "logits_dtype": n.dtype,
            "k": CHOSEN,
        },
    },
    ops.moe_experts: {"": _experts},
    ops.moe_experts_fp8: {
        "": partial(_experts_of_codes, ops.quant_fp8_per_token),
        "blocks": _experts_of_blocks,
    },
    ops.moe_experts_int8: {"": partial(_experts_of_codes, ops.quant_int8_per_token)},
    ops.moe_experts_w4a16: {"": _experts_w4a16},
    ops.moe_experts_mxfp4: {"": _experts_mxfp4},
    ops.linear: {"": _linear, "bias": lambda n: _linear(n) | {"bias": n(M)}},
    ops.linear_fp32: {"": _linear},
    ops.linear_gated: {
        "": _linear,
        **{name: partial(_linear_gated, name) for name in ("gelu", "gelu_tanh")},
    },
    ops.scaled_linear_fp8: {"": partial(_code_inputs, ops.quant_fp8_per_token)},
    ops.scaled_linear_fp8_block: {"": _blocks},
    ops.scaled_linear_int8: {"": partial(_code_inputs, ops.quant_int8_per_token)},
    ops.linear_w4a16: {"": _w4a16},
    ops.linear_nvfp4: {"": _nvfp4_a16},
    ops.linear_mxfp4: {"16 bits": _mxfp4_a16, "mxfp4": partial(_code_inputs, ops.quant_mxfp4)},
    ops.lora_linear: {"": _lora},
    ops.embedding: {"": lambda n: {"ids": n.below(100, n.T), "weight": n(100, D)}},
    ops.linear_split_cat: {"": _keys_and_values},
    **SEQUENCE_EXAMPLES,
}
