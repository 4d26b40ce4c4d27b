"""One call of one of our kernels over AITER beside the reference of its op."""

from collections.abc import Callable
from typing import Any

import torch
from test_kernels import (
    CODE_STEP,
    COMPUTED,
    assert_as_exact,
    assert_neighbours,
    is_code,
    run,
    same_bits,
    strides,
    tensors,
)
from torch import Tensor

from atomc.ops.op import REGISTRY, Kernel

Make = Callable[[], dict[str, Any]]
# Their gated activation is in codes, unless x has no scale: where these are a step off, results
# move. AITER's experts per token quantize it from fp32, the op from 16 bits. Of assert_near.
CODES_BETWEEN = {
    "moe_experts_fp8": {"most": 0.15, "more": 0.01},
    "moe_experts_mxfp4": {"most": 0.5, "more": 0.03},
    "quantized_mla_paged_attention": {"most": 0.5, "more": 0.01},
}
# AITER rounds each weight to the dtype of x, where the op keeps it in fp32.
ROUNDED_WEIGHTS = {"moe_experts_w4a16"}


def in_fp32(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with numbers in fp32, so that the reference does not round; codes stay codes."""
    wide = {
        name: value.float()
        if isinstance(value, Tensor) and value.is_floating_point() and not is_code(value)
        else value
        for name, value in arguments.items()
    }
    return wide | ({"out_dtype": torch.float32} if "out_dtype" in wide else {})


def assert_near(actual: Tensor, reference: Tensor, truth: Tensor, most: float, more: float) -> None:
    """As assert_as_exact, with other bounds: `most` of each element's distance from the truth or
    from the reference, whose codes of ties differ, `more` of the error as a whole than the
    reference has, both by the size of the truth.
    """
    assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape)
    if not actual.numel():
        return
    error, own_error = actual.float() - truth, reference.float() - truth
    size, rms, own = (x.square().mean().sqrt() for x in (truth, error, own_error))
    nearest = torch.minimum(error.abs(), (actual.float() - reference.float()).abs())
    assert (nearest <= most * (truth.abs() + size)).all(), f"off by {nearest.max():.3g}"
    assert rms <= 1.5 * own + more * size, f"off by {rms:.3g}, the reference is by {own:.3g}"


def assert_keys(actual: Tensor, reference: Tensor, before: Tensor) -> None:
    """The written rows of an indexer's cache are those of the reference, up to a rounding of their
    scale; others are as before. A row is codes and the four bytes of their scale.
    """
    written = (reference.view(torch.uint8) != before.view(torch.uint8)).any(-1)
    assert same_bits(actual[~written], before[~written]), "a row was written, and has no token"
    rows, expected = actual[written], reference[written]
    if len(expected):
        assert_neighbours(rows[:, :-4], expected[:, :-4], moved=0.04)
        scales = [x[:, -4:].contiguous().view(torch.float32) for x in (rows, expected)]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0.0)


def compare(kernel: Kernel, arguments: Make, dtype: torch.dtype, ties_away: bool = False) -> None:
    """The kernel's result is that of the reference, up to rounding, and it writes what the op says.

    ties_away  MXFP4 codes round ties away from zero, as in versions of AITER before those of today
    """
    op = REGISTRY[kernel.op]
    given, for_meaning, before = arguments(), arguments(), arguments()
    for_truth = in_fp32(arguments())  # with caches of its own
    if op.name == "quant_mxfp4" and ties_away:
        for_meaning["x"] = for_truth["x"] * (1 + 2**-20)  # no tie is left: each goes away from zero
    truth, meaning = tensors(op.reference(**for_truth)), tensors(op.reference(**for_meaning))
    actual = tensors(run(kernel, given))
    if len(actual) > 1 and actual[1].dtype == torch.uint8 and actual[1].numel():
        # Under MXFP4, any scale of a group of zeros will do.
        zeros = (actual[0].unflatten(-1, (-1, 16)) & 0x77 == 0).all(-1)
        actual[1].copy_(torch.where(zeros, meaning[1], actual[1]))
    assert len(actual) == len(meaning)
    for got, low, exact in zip(actual, meaning, truth, strict=True):
        wide = dtype == torch.bfloat16 or (kernel.rounds == "once" and dtype == torch.float16)
        if not got.is_floating_point() and not is_code(got):
            assert torch.equal(got, low), "other whole numbers"
        elif got.numel() and is_code(got) and wide and op.name in COMPUTED:
            # What AITER quantizes it has in fp32, or rounds once where the op rounds twice.
            assert_neighbours(got, exact, moved=0.05)
        elif op.name in CODES_BETWEEN and before.get("x_scale", got) is not None:
            assert_near(got, low, exact, **CODES_BETWEEN[op.name])
        elif op.name in ROUNDED_WEIGHTS:
            rounding = torch.finfo(dtype).eps
            assert_near(got, low, exact, most=6 * rounding, more=rounding)
        else:
            # AITER's quantizers divide where the op multiplies by a reciprocal, or the other way
            # round.
            codes = op.name in COMPUTED or op.name.startswith("quant")
            # AITER's products of codes are rounded before a bias is added.
            twice = "weight_scale" in before and before.get("bias") is not None
            rounding = torch.finfo(dtype).eps / 4 if twice else 0.0
            assert_as_exact(got, low, exact, dtype, codes, rounding)
        assert strides(got) == strides(low)
    for name, value in before.items():
        if name == "index_cache" and name in op.mutates and is_code(value):
            assert_keys(given[name], for_meaning[name], value)
        elif name in op.mutates and value is not None:
            written = for_meaning[name] != value
            # Beside the garbage in the rest of a cache, any value would be near enough.
            found = [x[name][written] for x in (given, for_meaning, for_truth)]
            if is_code(value) and kernel.rounds == "once":
                # What is near 0 may be several codes off.
                wide = (x.float() for x in found)
                assert_near(*wide, most=CODE_STEP[value.dtype], more=0.01)
            else:
                assert_as_exact(*found, value.dtype)
            assert torch.equal(given[name][~written], value[~written]), (
                f"{name} was written where it should not be"
            )
        elif isinstance(value, Tensor):
            assert same_bits(given[name], value), f"{name} was written, and the op says it is not"
