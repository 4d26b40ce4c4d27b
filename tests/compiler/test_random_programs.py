"""Random programs of views, arithmetic, casts and writes in place: numbers, strides, shared
memory.
"""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = [(), (1,), (3,), (2, 4), (4, 2), (1, 4), (2, 3, 4), (2, 1, 4), (0, 4), (2, 2, 2, 3)]
DTYPES = [torch.float32] * 4 + [torch.bfloat16, torch.float64, torch.int32, torch.int8]
# x is a value of the program, y another, d a dimension of x, n its size. What raises for the x at
# hand is left out.
VIEWS = [
    "x.transpose(0, d)", "x.transpose(-1, d)", "x.movedim(d, 0)", "x.flip(d)", "x.roll(1, d)", "x.unsqueeze(d)",
    "x.squeeze(d)", "x.squeeze()", "x.narrow(d, 1, n - 1)", "x.select(d, n - 1)", "x.chunk(2, d)[0]",
    "x.chunk(2, d)[-1]", "x.split([1, n - 1], d)[1]", "x.unflatten(d, (1, n))", "torch.cat((x, x), d)",
    "torch.cat((x.narrow(d, 1, n - 1), x.narrow(d, 0, 1)), d)", "torch.cat(x.split(1, d), d)",
    "torch.stack((x, x), d)", "x.reshape(-1)", "x.contiguous().view(x.shape)", "x.contiguous().view(-1)",
    "x[..., ::2]", "x[..., None]", "x[None]", "x[:1]", "x[..., :-1]", "x.amax(d, keepdim=True).expand_as(x)",
    "x.sum(d, keepdim=True)", "x.cumsum(d)", "x.sort(d)[0]", "x.repeat_interleave(2, d)", "x.t()",
    "x.view(torch.int32)", "x.view(torch.int8)", "x.view(torch.uint8)", "x.view(torch.int16)", "x.clone()",
    "x.detach()", "x.expand(2, *x.shape)",
]  # fmt: skip
VALUES = [
    "x + 1", "x * 1", "x / 1", "x - 0", "x + 0", "1 - x", "x * x", "x + x", "-x", "x.abs()", "x // 2", "x.pow(2)",
    "x.float() ** 1", "x.clamp(-3, 3)", "x > 0", "x.to(torch.float32)", "x.to(torch.bfloat16)", "x.to(torch.int32)",
    "x.to(torch.float64)", "torch.add(x, x, alpha=2)", "torch.sub(x, 1, alpha=2)", "x.float().exp().clamp(max=9)",
    "F.silu(x.float())", "F.silu(x.float()) * x", "F.gelu(x.float())", "x.float().softmax(-1)", "x & 15", "x >> 2",
    "x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)", "F.layer_norm(x.float(), x.shape[-1:])",
    "x.masked_fill(x > 1, 0)", "x + y", "x * y", "x - y", "torch.where(y > 0, x, y)", "torch.eq(x, y)",
    "torch.cat((x.reshape(-1), y.reshape(-1)))",
]  # fmt: skip
WRITES = [
    "x.add_(1)",
    "x.mul_(2)",
    "x.zero_()",
    "x.copy_(x.flip(0))",
    "x.neg_()",
    "x[:1].fill_(3)",
    "x[..., -1:].add_(1)",
    "x.transpose(0, -1)[:1].mul_(2)",
    "x.reshape(-1)[:2].zero_()",
    "x.select(0, 0).copy_(x.select(0, -1))",
    "x.narrow(-1, 0, 1).sub_(2)",
]


class Program:
    """A function made of random lines, as text; and its inputs."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        shape = self.random.choice(SHAPES)
        count = self.random.randint(1, 3)
        shapes = [
            shape if self.random.random() < 0.7 else self.random.choice(SHAPES)
            for _ in range(count)
        ]
        self.inputs = [
            (torch.randn(s) * 4).round(decimals=1).to(self.random.choice(DTYPES)) for s in shapes
        ]
        self.values = {f"x{i}": x.clone() for i, x in enumerate(self.inputs)}
        self.lines: list[str] = []
        for _ in range(self.random.randint(2, 9)):
            self.grow()
        names = list(self.values)
        returned = self.random.sample(names, min(len(names), self.random.randint(1, 3)))
        head, end = f"def program({', '.join(names[:count])}):", f"return {', '.join(returned)},"
        self.text = "\n    ".join([head, *self.lines, end])

    def grow(self) -> None:
        """One more line, if what was drawn is possible."""
        [kind] = self.random.choices([VIEWS, VALUES, WRITES], [5, 5, 1])
        (x, value), (y, _) = (self.random.choice(list(self.values.items())) for _ in "xy")
        d = self.random.randrange(value.dim()) if value.dim() else 0
        n = value.shape[d] if value.dim() else 1
        names = {"x": x, "y": y, "d": str(d), "n": str(n)}
        line = re.sub(r"\b[xydn]\b", lambda found: names[found[0]], self.random.choice(kind))
        try:
            made = eval(line, {"torch": torch, "F": F}, self.values)
        except (RuntimeError, IndexError, ValueError):
            return
        if kind is WRITES:
            self.lines.append(line)
        else:
            name = f"v{len(self.lines)}"
            self.values[name] = made
            self.lines.append(f"{name} = {line}")

    def function(self):
        names = {"torch": torch, "F": F}
        exec(self.text, names)
        return names["program"]


def sharing(tensors: list[Tensor]) -> list[list[bool]]:
    """Which of these lie in one memory."""
    memory = [x.untyped_storage()._cdata for x in tensors]
    return [[a == b for b in memory] for a in memory]


@pytest.mark.rotating(each_case=4)
@pytest.mark.parametrize("seed", range(80))
@torch.no_grad()
def test_a_random_program_does_what_torchs_own_tracing_does(seed):
    program = Program(seed)
    theirs, ours = ([x.clone() for x in program.inputs] for _ in "ab")
    try:
        expected = torch.compile(program.function(), backend="aot_eager")(*theirs)
    except Exception as error:
        pytest.skip(f"torch cannot trace it: {type(error).__name__}")
    found = torch.compile(program.function(), backend="atom", options={"glue": "eager"})(*ours)
    for got, wanted in zip([*found, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(
            got,
            wanted,
            equal_nan=True,
            rtol=1e-2 if wanted.dtype == torch.bfloat16 else 1e-4,
            atol=1e-3,
            msg=lambda told: f"{told}\n{program.text}",
        )
        assert wanted.numel() < 2 or got.stride() == wanted.stride(), program.text
    assert sharing([*found, *ours]) == sharing([*expected, *theirs]), program.text


@torch.no_grad()
def test_a_copy_of_a_strided_input_that_is_written_stays_a_copy():
    def program(x):
        column = x.transpose(-1, -2).reshape(-1, 1)
        x.mul_(2)
        return column.transpose(-1, -2).contiguous()

    theirs, ours = (torch.arange(12.0)[None, None, ::2] for _ in "ab")
    expected = program(theirs)
    found = torch.compile(program, backend="atom", options={"glue": "eager"})(ours)
    assert torch.equal(found, expected) and torch.equal(ours, theirs)
    assert found.stride() == expected.stride() and sharing([found, ours]) == sharing(
        [expected, theirs]
    )
