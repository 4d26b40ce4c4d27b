"""Linear layers with 4-bit weights in strips: every code at every place, which layers are held so, and
the kernel of one row.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomc
from atomc import kernels, ops
from atomc.ops.formats import pack_e2m1, pack_int4

pytest.importorskip("triton")
assert kernels.load("triton") is None
# Only where there is Triton.
strip_pairs, strip_rows, strip_values, tile_table = (
    importlib.import_module(f"atomc.kernels.triton.{name}")
    for name in (
        "w4a16.w4a16_mma_pair",
        "w4a16.w4a16_mma_rows",
        "w4a16.strip_values",
        "launch.tile_table",
    )
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, Triton's interpreter runs


def kernel_of(op: str) -> ops.Kernel:
    """The kernel for strips."""
    module = "atomc.kernels.triton.w4a16.w4a16_mma"
    [found] = [each for each in ops.REGISTRY[op].kernels if each.function.__module__ == module]
    return found


def in_strips(codes: Tensor, scale: Tensor, zeros: Tensor | None, group: int) -> tuple[Any, ...]:
    """The weight, scales and zeros as the kernels for strips read them."""
    given = {"weight": pack_int4(codes).to(DEVICE), "weight_scale": scale.to(DEVICE)}
    given |= {"zeros": None if zeros is None else zeros.to(DEVICE, torch.uint8), "group": group}
    prepared = kernel_of("linear_w4a16").prepared(given)
    return tuple(prepared.get(name, (None,))[0] for name in ("weight", "weight_scale", "zeros"))


INT4_TILES = [(8, 128, 4, 2, 1), (16, 32, 2, 2, 4), (64, 64, 4, 2, 2, 256), (8, 16, 1, 3, 9, 128)]


@pytest.mark.covering
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("columns", "group", "dtype"),
    [(32, 32, torch.bfloat16), (1152, 64, torch.float16), (1280, 128, torch.bfloat16)],
)
def test_every_int4_code_in_strips_is_read_exactly_where_k_is_split_or_not(
    zeros: bool, columns: int, group: int, dtype: torch.dtype
) -> None:
    codes = torch.stack([(torch.arange(columns) + shift) % 16 for shift in range(16)] * 3)
    groups = columns // group
    offset = (torch.arange(48)[:, None] + torch.arange(groups)) % 16
    scale = 2.0 ** (torch.arange(48)[:, None] % 2 + torch.arange(groups) % 5)
    zero = offset.repeat_interleave(group, 1) if zeros else 8
    exact = (codes - zero) * scale.repeat_interleave(group, 1)
    prepared = in_strips(codes, scale.to(dtype), offset if zeros else None, group)
    values = strip_values.unpacked(*prepared, group, columns, dtype)
    assert torch.equal(values.cpu().float(), exact)
    # 70 is more than a tile has.
    rows = torch.eye(columns, dtype=dtype, device=DEVICE).split(70)
    for number, tile in enumerate(INT4_TILES):
        first = (0, len(rows) // 2, len(rows) // 3, len(rows) - 1)[number]
        shape = tile_table.StripTile(*tile)
        out = strip_rows.multiply(rows[first], *prepared, None, group, shape)
        wanted = exact.T[first * 70 : first * 70 + len(rows[first])]
        assert torch.equal(out.cpu().float(), wanted)


def test_every_e2m1_code_in_strips_is_read_exactly_under_scales_of_all_sizes() -> None:
    columns = 160
    codes = torch.stack([(torch.arange(columns) + shift) % 16 for shift in range(16)] * 3)
    scales = (40 + 12 * torch.arange(48)[:, None] % 100 + 3 * torch.arange(columns // 32)) % 150
    given = {
        "weight": pack_e2m1(codes.to(torch.uint8)).to(DEVICE),
        "weight_scale": scales.to(DEVICE, torch.uint8),
    }
    prepared = kernel_of("linear_mxfp4").prepared(given)
    stored = (*prepared["weight"], *prepared["weight_scale"], None)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([magnitudes, -magnitudes])[codes]
    exact = values * 2.0 ** (scales.repeat_interleave(32, 1) - 127)
    bf16 = torch.bfloat16
    assert torch.equal(
        strip_values.unpacked(*stored, 32, columns, bf16, int4=False).cpu().float(), exact
    )
    rows = torch.eye(columns, dtype=bf16, device=DEVICE)[70:140]
    for tile in INT4_TILES:
        shape = tile_table.StripTile(*tile)
        out = strip_rows.multiply(rows, *stored, None, 32, shape, int4=False)
        assert torch.equal(out.cpu().float(), exact.T[70:140])


@pytest.mark.parametrize(
    ("out", "dtype", "copied", "reason"),
    [
        (40, torch.bfloat16, 1.0, "the weight has 40 rows: written for multiples of 16"),
        (
            48,
            torch.float32,
            1.0,
            "x is torch.float32, weight_scale is torch.float32: written for torch.bfloat16 or "
            "torch.float16, all of one dtype",
        ),
        (48, torch.bfloat16, 0.0, "copies of weights would take 0.0 GB, more than 0% of"),
    ],
)
def test_a_layer_that_is_not_held_in_strips_is_read_as_it_is_stored(
    out: int,
    dtype: torch.dtype,
    copied: float,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atomc.compiler.weight_forms.MOST_COPIED", copied)
    layer = nn.Sequential(nn.Linear(128, out, bias=False)).to(dtype).requires_grad_(False)
    x = torch.randn(300, 128, dtype=dtype)
    torch._dynamo.mark_dynamic(x, 0)
    report = atomc.explain(atomc.quantize(layer, "int4"), x, platform="h200")
    choices = [choice for choice in report.kernels if choice.op == "linear_w4a16"]
    assert choices
    for choice in choices:
        assert choice.chosen == "triton"
        assert any(reason in why for _, why in choice.refused), choice.refused


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(32, 32), (352, 32), (9216, 64), (1280, 128)])
def test_every_int4_code_in_strips_is_read_exactly_two_at_a_time(
    columns: int, group: int, zeros: bool
) -> None:
    codes = torch.stack([(torch.arange(columns) + shift) % 16 for shift in range(16)] * 2)
    groups = columns // group
    offset = (torch.arange(32)[:, None] + torch.arange(groups)) % 16
    scale = 2.0 ** (torch.arange(groups) % 5).expand(32, -1).contiguous()
    zero = offset.repeat_interleave(group, 1) if zeros else 8
    exact = (codes - zero) * scale.repeat_interleave(group, 1)
    prepared = in_strips(codes, scale.bfloat16(), offset if zeros else None, group)
    ones = torch.eye(columns, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.ones(32, device=DEVICE)
    for first in [*range(32), columns // 2, columns - 3, columns - 2]:
        out = strip_pairs.multiply(ones[first : first + 1], *prepared, bias, group)
        assert torch.equal(out.cpu().float(), exact.T[first : first + 1] + 1)
