"""Compile a module of your own, compare it with eager, and time it beside Inductor.

python examples/backend.py
python examples/backend.py --width 512 --layers 4 --tokens 128 --rounds 25
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc


class Block(nn.Module):
    """RMSNorm and a gated MLP, added to the input. x [B, T, W] -> [B, T, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def medians(calls: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Milliseconds of each call, in turns, so that all see the same state of the machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(3 + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 3:  # the first calls compile
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a module in eager, Inductor and atomc.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    flags = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*(Block(flags.width) for _ in range(flags.layers))).eval().to(device)
    x = torch.randn(2, flags.tokens, flags.width, device=device)

    with torch.inference_mode():
        atom = torch.compile(model, backend="atom")
        torch.testing.assert_close(atom(x), model(x), rtol=1e-4, atol=1e-5)
        print("equal to eager")
        print(atomc.reports()[-1].why("silu_and_mul"))
        inductor = torch.compile(model, backend="inductor")
        calls = {
            "eager": lambda: model(x),
            "inductor": lambda: inductor(x),
            "atom": lambda: atom(x),
        }
        for name, ms in medians(calls, flags.rounds).items():
            print(f"{name:9} {ms:8.3f} ms")


if __name__ == "__main__":
    main()
