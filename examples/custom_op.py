"""An op with a kernel and a rewrite in a file of your own: relu(x) ** 2 (So et al. 2021, "Primer").

    python examples/custom_op.py

The reference defines the op; the rewrite recognizes it in a model, its pattern is the reference;
the kernel computes it in a second way, and refuses what it cannot do. docs/add-op.md has the same
op as a part of atomc, with a kernel in Triton.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc
from atomc.ops.op import op
from atomc.ops.op_traits import Kind
from atomc.platform import Platform


@op(kind=Kind.OTHER, rows=None)
def relu_squared(x: Tensor) -> Tensor:
    """relu(x) ** 2. x [..., I] -> [..., I], rounded after each step."""
    return F.relu(x).square()


def refuse_relu_squared(platform: Platform, x: Tensor) -> atomc.ops.Refusal | None:
    if not x.is_contiguous():
        return atomc.ops.Refusal("layout", "x is not contiguous")
    return None


@atomc.register_kernel("relu_squared", "mine", refuses=refuse_relu_squared)
def relu_squared_kernel(x: Tensor) -> Tensor:
    y = F.relu(x)
    return y.mul_(y)  # in place: one tensor less than the reference allocates


RELU_SQUARED = atomc.Rewrite(
    "relu_squared",
    relu_squared.reference,
    relu_squared,
    lambda: {"x": torch.empty(3, 5)},
)


class MLP(nn.Module):
    """The MLP of Primer. x [T, 32] -> [T, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.square(torch.relu(self.up(x))))


def main() -> None:
    torch.manual_seed(0)
    model, x = MLP().eval(), torch.randn(4, 32)
    with atomc.register_pass(RELU_SQUARED), torch.inference_mode():
        compiled = torch.compile(model, backend="atom")
        torch.testing.assert_close(compiled(x), model(x))
        print(atomc.reports()[-1].why("relu_squared"))


if __name__ == "__main__":
    main()
