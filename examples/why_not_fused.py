"""Ask why a rewrite did not fire, change the line that the report names, and require the rewrite.

python examples/why_not_fused.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc


class MLP(nn.Module):
    """A gated MLP whose factor stands between the activation and the product. x [T, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * 0.5 * self.up(x))


class Repaired(MLP):
    """The same function, with the factor behind the product."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) * 0.5)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    model = nn.Sequential(MLP(), MLP()).eval()

    # Nothing runs: the module is compiled for a described machine, by default this one.
    report = atomc.explain(model, x)
    print("before:", report.why("silu_and_mul"))

    repaired = nn.Sequential(Repaired(), Repaired()).eval()
    repaired.load_state_dict(model.state_dict())
    # Fails the compilation if the rewrite is ever lost again.
    required: dict[str, Any] = {"expect": {"silu_and_mul": "layers"}}
    compiled = torch.compile(repaired, backend="atom", options=required)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    print("after:", atomc.reports()[-1].why("silu_and_mul"))
    print(atomc.reports()[-1])

    try:
        strict = torch.compile(model, backend="atom", options=required)
        with torch.inference_mode():
            strict(x)
    except atomc.ContractError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
