"""One row times int4 weights in strips: the interpreter runs no PTX, so what the two texts of the
kernel compute stands here in numpy. What is read, and where, is the kernel's.
"""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_w4a16 import in_strips

from atomc import kernels

pytest.importorskip("triton")
assert kernels.load("triton") is None
strip_pairs = importlib.import_module("atomc.kernels.triton.w4a16.w4a16_mma_pair")

Array = NDArray[Any]


def halves(pairs: Array) -> tuple[Array, Array]:
    """The two bf16 numbers of int32, in fp32."""
    words = pairs.astype(np.int64) & 0xFFFFFFFF
    low, high = (words & 0xFFFF) << 16, words & 0xFFFF0000
    return low.astype(np.uint32).view(np.float32), high.astype(np.uint32).view(np.float32)


def unpack(words: Array, minus: Array) -> list[Array]:
    """UNPACK: the four pairs of a word, each code plus 128 and `minus`."""
    found = []
    for j in range(4):
        low, high = halves((words >> (4 * j)) & 0x000F000F | 0x43004300)
        of_low, of_high = halves(minus)
        bits = [(x + y).view(np.uint32) >> 16 for x, y in ((low, of_low), (high, of_high))]
        found.append((bits[0] | (bits[1] << 16)).view(np.int32))
    return found


def dot(*pairs: Array) -> Array:
    """DOT: the sum of the products of the first four pairs and the last four."""
    total = np.zeros(np.broadcast_shapes(*(p.shape for p in pairs)), np.float32)
    for weight, x in zip(pairs[:4], pairs[4:], strict=True):
        for one, other in zip(halves(weight), halves(x), strict=True):
            total += one * other
    return total


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernel itself runs here")
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def elementwise(asm: Any, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
        text = getattr(asm, "value", asm)
        given = np.broadcast_arrays(*(arg.handle.data for arg in args))
        shape = list(given[0].shape)

        def tensor(data: Array, of: Any) -> Any:
            return tl.tensor(TensorHandle(data, of), tl.block_type(of, shape))

        if text == strip_pairs.UNPACK.value:
            return tuple(map(tensor, unpack(*given), dtype))
        assert text == strip_pairs.DOT.value
        return tensor(dot(*given), dtype)

    monkeypatch.setattr(tl, "inline_asm_elementwise", elementwise)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("columns", "group"), [(32, 32), (352, 32), (2176, 64), (1280, 128), (1024, 32)]
)
def test_every_int4_code_of_a_row_meets_its_column_of_x_and_its_scale(
    in_numpy: None, columns: int, group: int, zeros: bool
) -> None:
    codes = torch.stack([(torch.arange(columns) + shift) % 16 for shift in range(16)] * 2)
    groups = columns // group
    offset = (torch.arange(32)[:, None] + torch.arange(groups)) % 16
    scale = 2.0 ** ((torch.arange(32)[:, None] + torch.arange(groups)) % 5)
    stored = in_strips(codes, scale.bfloat16(), offset if zeros else None, group)
    zero = offset.repeat_interleave(group, 1) if zeros else 8
    exact = (codes - zero) * scale.repeat_interleave(group, 1)
    bias = torch.arange(32.0)
    # Two columns at once, of different words.
    for first in (0, 1, 14, columns - 18):
        x = torch.zeros(1, columns, dtype=torch.bfloat16)
        x[0, first], x[0, first + 17] = 1.0, 0.5
        out = strip_pairs.multiply(x, *stored, bias, group)
        wanted = exact[:, first] + 0.5 * exact[:, first + 17] + bias
        assert torch.equal(out[0].float(), wanted.bfloat16().float())
