"""Random pieces of models, of odd widths and layouts, with all that Triton serves: what eager
gives, inside its tensors.
"""

import os
import random
import re

import pytest
import torch
import torch.nn.functional as F
from test_kernels import assert_neighbours
from torch import Tensor

import atomc
from atomc import ops

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here"
)

LEADING = [(), (1,), (3,), (2, 5), (1, 7), (2, 1), (0, 3), (5, 2, 3)]
# x is a value of the program, y another that is mostly like it, D the width of x; tables and
# weights are D wide.
BLOCKS = [
    "norm(x, w, 1e-5)",
    "norm(x + y, w, 1e-6)",
    "norm_in_fp32(x, w, 1e-5)",
    "F.rms_norm(x, (D,), w, 1e-5)",
    "F.layer_norm(x, (D,), w, b, 1e-5)",
    "F.layer_norm(x + y, (D,), w)",
    "F.silu(x) * y",
    "F.gelu(x) * y",
    "F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]",
    "F.gelu(x.chunk(2, -1)[1], approximate='tanh') * x.chunk(2, -1)[0]",
    "rotated(x, cos, sin)",
    "rotated(x.transpose(0, 1), cos, sin)",
    "F.linear(x, W)",
    "F.linear(x, W, b)",
    "x + y",
    "x * y",
]
LAYOUTS = [
    "x.transpose(0, 1)",
    "x.transpose(-1, -2)",
    "x[..., ::2]",
    "x[..., 1:]",
    "x[:1]",
    "x.unsqueeze(0)",
    "x.flatten(0, 1)",
    "x.unflatten(-1, (2, -1))",
    "x.expand(2, *x.shape)",
    "x.contiguous()",
    "F.pad(x, (0, 3))",
    "x.split([1, D - 1], -1)[1]",
    "x.to(SIXTEEN)",
    "x.float()",
    "x.mul_(2)",
    "x.add_(y)",
]
QUANTIZED = [
    f"{op}({of})"
    for op in ("ops.quant_fp8_per_token", "ops.quant_int8_per_token", "in_groups")
    for of in ("x", "norm(x, w, 1e-5)", "norm(x + y, w, 1e-5)", "F.silu(x) * y")
]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_in_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(
        x.dtype
    )


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def in_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return ops.quant_fp8_group(x, 128)


NAMES = {
    "torch": torch,
    "F": F,
    "ops": ops,
    "norm": norm,
    "norm_in_fp32": norm_in_fp32,
    "rotated": rotated,
    "in_groups": in_groups,
}


class Block:
    """A function made of random lines, as text; its inputs, then the weights and tables that it
    reads.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.sixteen = torch.bfloat16 if seed % 2 else torch.float16
        dtype, self.width = (
            self.random.choice([torch.float32, self.sixteen]),
            self.random.choice([4, 10, 33, 64, 128]),
        )
        leading = self.random.choice(LEADING)
        self.inputs = [self.draw(leading, dtype) for _ in range(self.random.randint(1, 3))]
        self.values = {f"x{i}": copied(x) for i, x in enumerate(self.inputs)}
        self.constants: dict[str, Tensor] = {}
        self.lines: list[str] = []
        self.returned: list[str] = []
        for _ in range(self.random.randint(2, 7)):
            self.grow()
        names = list(self.values)
        self.returned += [names[-1], *self.random.sample(names, min(len(names), 2))]
        given = [*names[: len(self.inputs)], *self.constants]
        lines = [*self.lines, f"return {', '.join(dict.fromkeys(self.returned))},"]
        self.text = "\n    ".join([f"def program({', '.join(given)}):", *lines])

    def draw(self, leading: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that lies in rows, in parts of rows, in every second column, transposed, or in a
        larger one.
        """
        kind, width = self.random.randrange(6), self.width
        if kind == 1:
            return torch.randn(*leading, 2 * width, dtype=dtype)[..., :width]
        if kind == 2:
            return torch.randn(*leading, 2 * width, dtype=dtype)[..., ::2]
        if kind == 3:
            return torch.randn(width, *leading, dtype=dtype).movedim(0, -1)
        if kind == 4 and leading:
            return torch.randn(leading[0] + 2, *leading[1:], width, dtype=dtype)[1:-1]
        return torch.randn(*leading, width, dtype=dtype)

    def grow(self) -> None:
        """One more line, if what was drawn is possible."""
        floats = [
            (name, x)
            for name, x in self.values.items()
            if x.dtype in (torch.float32, self.sixteen) and x.dim()
        ]
        x, value = self.random.choice(floats[-2:] if self.random.random() < 0.6 else floats)
        y = self.random.choice([name for name, other in floats if other.shape == value.shape])
        [kind] = self.random.choices([BLOCKS, LAYOUTS, QUANTIZED], [5, 4, 2])
        width = value.shape[-1]
        spelled = {"x": x, "y": y, "D": str(width), "SIXTEEN": str(self.sixteen)}
        spelled |= {
            name: f"{name}{width}_{value.element_size()}" for name in ("w", "b", "W", "cos", "sin")
        }
        line = re.sub(
            r"\b(x|y|D|w|b|W|cos|sin|SIXTEEN)\b",
            lambda found: spelled[found[0]],
            self.random.choice(kind),
        )
        new = {}
        for name in ("w", "b", "W", "cos", "sin"):
            if re.search(rf"\b{spelled[name]}\b", line) and spelled[name] not in self.constants:
                made = torch.randn(width, width) / width**0.5 if name == "W" else torch.randn(width)
                new[spelled[name]] = made.to(value.dtype)
        try:
            made = eval(line, NAMES, {**self.values, **self.constants, **new})
        except (RuntimeError, IndexError, ValueError):
            return
        self.constants |= new
        if "_(" in line.replace(" ", "") and line.startswith((f"{x}.mul_", f"{x}.add_")):
            self.lines.append(line)
            return
        names = (
            [f"v{len(self.lines)}"]
            if isinstance(made, Tensor)
            else [f"codes{len(self.lines)}", f"s{len(self.lines)}"]
        )
        self.values |= dict(zip(names, [made] if isinstance(made, Tensor) else made, strict=True))
        self.returned += names if len(names) > 1 else []
        self.lines.append(f"{', '.join(names)} = {line}")

    def function(self):
        names = dict(NAMES)
        exec(self.text, names)
        return names["program"]


def copied(x: Tensor) -> Tensor:
    """A tensor that lies in a copy of this one's memory as this one does in its own."""
    return torch.empty(0, dtype=x.dtype).set_(
        x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride()
    )


def strides(x: Tensor) -> list[int]:
    return [
        stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()
    ]


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize("seed", range(48))
@torch.no_grad()
def test_a_random_piece_of_a_model_gives_what_eager_gives(seed: int, pretended_gpu: None) -> None:
    block = Block(seed)
    theirs, ours = ([copied(x) for x in block.inputs] for _ in "ab")
    constants = list(block.constants.values())
    expected = block.function()(*theirs, *constants)
    run = torch.compile(
        block.function(),
        backend="atom",
        dynamic=[None, True, False][seed % 3],
        options={"glue": "eager"},
    )
    found = run(*ours, *constants)
    for got, wanted in zip([*found, *ours], [*expected, *theirs], strict=True):
        assert (got.shape, got.dtype, strides(got)) == (
            wanted.shape,
            wanted.dtype,
            strides(wanted),
        ), block.text
        if wanted.element_size() == 1:
            assert not wanted.numel() or assert_neighbours(got, wanted, moved=0.05) is None, (
                block.text
            )
        elif wanted.numel():
            size = float(wanted.float().abs().max())
            sixteen = str(block.sixteen) in block.text or block.sixteen in {
                x.dtype for x in block.inputs
            }
            atol = size * (3e-2 if sixteen else 1e-3)
            torch.testing.assert_close(
                got, wanted, rtol=0, atol=atol + 1e-5, msg=lambda told: f"{told}\n{block.text}"
            )


def test_pieces_are_fused_and_served_by_triton(pretended_gpu: None) -> None:
    text = "def program(x, y, w): return ops.quant_fp8_per_token(norm(x + y, w, 1e-5)), x + y"
    names = dict(NAMES)
    exec(text, names)
    x, y, w = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33)
    torch.compile(names["program"], backend="atom", options={"glue": "eager"})(x, y, w)
    assert [(c.op, c.chosen) for c in atomc.reports()[-1].kernels] == [
        ("add_rms_norm_quant", "triton")
    ]
