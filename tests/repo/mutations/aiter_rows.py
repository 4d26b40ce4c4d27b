"""Bugs in the kernels over AITER for norms, activations, quantizers and linear layers."""

from mutations import Bug

KERNELS = "atomc/kernels/aiter"


def values(name: str) -> str:
    return f"tests/kernels/aiter/test_aiter_values.py -k '{name}-'"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"{KERNELS}/{file}.py", old, new, tests)


BUGS = [
    bug(
        "rows/norm",
        "normed_rows(rmsnorm2d_fwd, x, weight, eps)",
        "normed_rows(rmsnorm2d_fwd, x, weight, 1.0)",
        values("norm.rms_norm"),
    ),
    bug(
        "rows/norm",
        "weight, eps, gemma_norm=True)",
        "weight, eps, gemma_norm=False)",
        values("norm.rms_norm"),
    ),
    bug(
        "rows/norm",
        'gemma = style == "one_plus"',
        'gemma = style != "one_plus"',
        values("norm.add_rms_norm"),
    ),
    bug(
        "rows/norm",
        "function(out, flat, other, total,",
        "function(out, flat, torch.zeros_like(flat), total,",
        values("norm.add_rms_norm"),
    ),
    bug(
        "rows/norm",
        "return out.view(x.shape), total.view(x.shape)",
        "return total.view(x.shape), out.view(x.shape)",
        values("norm.add_layer_norm"),
    ),
    bug(
        "rows/norm",
        "normed_rows(layernorm2d_fwd, x, weight, bias, eps)",
        "normed_rows(layernorm2d_fwd, x, bias, weight, eps)",
        values("norm.layer_norm"),
    ),
    bug(
        "rows/norm",
        "        or uneven(x.shape[-1], STORED_COLUMNS)\n",
        "",
        values("norm.rms_norm"),
    ),
    bug(
        "rows/norm_quant",
        "GROUPLESS = (4096, 6144)",
        "GROUPLESS = (4096, 5000)",
        values("norm_quant.rms_norm_quant"),
    ),
    bug(
        "rows/norm_quant",
        '"int8_per_token": "truncates',
        '"none": "truncates',
        values("norm_quant.add_rms_norm_quant"),
    ),
    bug(
        "rows/norm_quant",
        "flat, other, total, outputs[1]",
        "flat, total, other, outputs[1]",
        values("norm_quant.add_rms_norm_quant"),
    ),
    bug(
        "rows/norm_quant",
        "shape = (groups, count) if by_column else (count, groups)",
        "shape = (count, groups)",
        values("norm_quant.rms_norm_quant"),
    ),
    bug(
        "rows/activation",
        "_gated(GELUS[approximate], gate, up)",
        '_gated(GELUS["none"], gate, up)',
        values("activation.gelu_and_mul"),
    ),
    bug(
        "rows/activation",
        "or apart(gate, up) or uneven(gate.shape[-1], 2)",
        "or apart(gate, up)",
        values("activation.silu_and_mul"),
    ),
    bug(
        "library",
        "return first.as_strided((first.numel()",
        "return second.as_strided((first.numel()",
        values("activation.silu_and_mul"),
    ),
    bug(
        "rows/quant",
        "static_per_tensor_quant(codes, flat, scale)",
        "static_per_tensor_quant(codes, flat, 1 / scale)",
        values("quant.quant_fp8_static"),
    ),
    bug(
        "rows/quant",
        "shuffle_scale=column_major_scales",
        "shuffle_scale=not column_major_scales",
        values("quant.quant_fp8_group"),
    ),
    bug("rows/quant", "STORED_CODES = 4", "STORED_CODES = 1", values("quant.quant_fp8_per_token")),
    bug("rows/quant", 'if rounding != "up":', 'if rounding == "up":', values("quant.quant_mxfp4")),
    bug(
        "linear/linear",
        "rows(x), weight, bias=bias)",
        "rows(x), weight, bias=None)",
        values("linear.linear"),
    ),
    bug(
        "linear/linear",
        'named("x weight", gapped)',
        'named("weight", gapped)',
        values("linear.linear"),
    ),
    bug(
        "linear/scaled_linear",
        "scale_a=x_scale, scale_b=weight_scale",
        "scale_a=x_scale, scale_b=x_scale",
        values("scaled_linear.scaled_linear_fp8"),
    ),
    bug(
        "library",
        "return out if bias is None else out.add_(bias)",
        "return out",
        values("scaled_linear_blocks.scaled_linear_fp8_block"),
    ),
    bug(
        "linear/scaled_linear",
        "bpreshuffle=True,\n    )\n    return plus(with_lead(out, x), bias)",
        "bpreshuffle=True,\n    )\n    return with_lead(out, x)",
        values("scaled_linear.linear_mxfp4"),
    ),
    bug(
        "linear/linear_triton",
        "product = partial(triton_gemm_a8w8, bias=bias)",
        "product = triton_gemm_a8w8",
        values("linear_triton.scaled_linear_fp8"),
    ),
    bug(
        "linear/scaled_linear",
        'named("weight weight_scale", gapped)',
        'named("weight", gapped)',
        values("scaled_linear.scaled_linear_int8"),
    ),
    bug(
        "linear/scaled_linear",
        "e8m0_view(shuffled_scale(as_rows(x_scale)))",
        "e8m0_view(as_rows(x_scale).contiguous())",
        values("scaled_linear.linear_mxfp4"),
    ),
    bug(
        "linear/scaled_linear",
        "AT_ONCE = 256",
        "AT_ONCE = 128",
        values("scaled_linear.linear_mxfp4"),
    ),
    bug(
        "linear/scaled_linear_rows",
        "(512, 128, 128)",
        "(512, 64, 128)",
        "tests/kernels/aiter/test_aiter_guards.py -k tiles",
    ),
    bug(
        "linear/scaled_linear_rows",
        "x, tiles, x_scale, weight_scale, dtype=out_dtype",
        "x, tiles, weight_scale, x_scale, dtype=out_dtype",
        values("scaled_linear_rows.scaled_linear_fp8"),
    ),
    bug(
        "linear/scaled_linear_blocks",
        "        tiles,\n        x_scale,\n",
        "        tiles,\n        x_scale.contiguous(),\n",
        values("scaled_linear_blocks.scaled_linear_fp8_block"),
    ),
    bug(
        "linear/packing",
        "Prepared((shuffled_weight(weight),))",
        "Prepared((weight.detach().clone(),))",
        values("scaled_linear_rows.scaled_linear_fp8"),
    ),
    bug(
        "linear/packing",
        "tiles.permute(0, 1, 3, 4, 2, 5)",
        "tiles.permute(0, 1, 3, 2, 4, 5)",
        values("scaled_linear_blocks.scaled_linear_fp8_block"),
    ),
    bug(
        "linear/packing",
        "Prepared((_tiled(scale.detach(), ones),))",
        "Prepared((torch.cat((scale, ones[n:])),))",
        values("scaled_linear.linear_mxfp4"),
    ),
    bug(
        "linear/packing",
        "permute(0, 5, 3, 1, 4, 2)",
        "permute(0, 4, 3, 1, 5, 2)",
        "tests/kernels/aiter/test_aiter_packing.py -k scales",
    ),
    bug(
        "linear/packing",
        "enumerate(range(32 * whole, m, 16))",
        "enumerate(range(32 * whole, m - 15, 16))",
        "tests/kernels/aiter/test_aiter_packing.py -k scales",
    ),
    bug(
        "linear/scaled_linear",
        "bpreshuffle=True",
        "bpreshuffle=False",
        values("scaled_linear.linear_mxfp4"),
    ),
    bug(
        "library",
        '"gfx942": torch.float8_e4m3fnuz',
        '"gfx942": torch.float8_e4m3fn',
        values("quant.quant_fp8_per_token"),
    ),
    bug(
        "rows/norm_quant",
        'size = group if scheme == "fp8_group" else 0',
        'size = 128 if scheme == "fp8_group" else 0',
        values("norm_quant.rms_norm_quant"),
    ),
    bug(
        "rows/norm_quant",
        "dtype=torch.uint8), 32",
        "dtype=torch.uint8), 64",
        values("norm_quant.rms_norm_quant"),
    ),
    bug(
        "linear/scaled_linear_blocks",
        "OUTPUTS = 64",
        "OUTPUTS = 16",
        values("scaled_linear_blocks.scaled_linear_fp8_block"),
    ),
]
