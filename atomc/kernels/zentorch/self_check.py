"""A program that multiplies small matrices by zentorch, and prints the signal-to-error ratio of
each kind of linear.

On a CPU without an instruction that zentorch uses, the process is killed, or the output stays as it
was, which is NaN here. atomc.kernels.zentorch.library runs it, with sys.path as its argument; it
does not import atomc.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

ROWS = (1, 2, 40)
N, K, GROUP = 48, 128, 32


def decibels(found: Tensor, truth: Tensor) -> float:
    """The signal-to-error ratio in dB; NaN if a value is NaN."""
    truth = truth.double()
    error = (found.double() - truth).square().sum().clamp(min=1e-300)
    return 10 * float((truth.square().sum() / error).log10())


def forget() -> None:
    """zentorch caches weights by address, and the next weight can get the same address."""
    torch.ops.zentorch.zentorch_clear_weight_cache()


def int8(rows: int) -> float:
    forget()
    x, weight = (torch.randint(-127, 128, (count, K), dtype=torch.int8) for count in (rows, N))
    scale, out = torch.rand(N) + 0.1, torch.full((rows, N), float("nan"))
    torch.ops.zentorch.zentorch_qlinear.out(
        out,
        x,
        weight,
        torch.ones(1),
        torch.zeros(1, dtype=torch.int32),
        scale,
        torch.zeros(N, dtype=torch.int32),
        None,
        None,
        None,
        out.dtype,
    )
    return decibels(out, x.double() @ weight.double().t() * scale.double())


def int4(rows: int) -> float:
    forget()
    x = torch.randn(rows, K).to(torch.bfloat16)
    codes, zero = (torch.randint(0, 16, (N, count), dtype=torch.int32) for count in (K, K // GROUP))
    scale, out = (
        (torch.rand(N, K // GROUP) + 0.1).to(torch.bfloat16),
        torch.full((rows, N), float("nan"), dtype=x.dtype),
    )
    words = (
        (codes.view(N, K // 8, 8) << torch.arange(0, 32, 4, dtype=torch.int32))
        .sum(-1)
        .to(torch.int32)
    )
    torch.ops.zentorch.zentorch_woq_linear.out(
        x, words.t(), scale.t().contiguous(), zero.t().to(torch.int8).contiguous(), None, out=out
    )
    weight = (codes.view(N, -1, GROUP) - zero.unsqueeze(-1)).double() * scale.double().unsqueeze(-1)
    return decibels(out, x.double() @ weight.flatten(1).t())


CHECKS: dict[str, Callable[[int], float]] = {"int8": int8, "int4": int4}


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    import zentorch  # noqa: F401

    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, check in CHECKS.items():
        try:
            results: dict[str, list[float] | str] = {"decibels": [check(rows) for rows in ROWS]}
        except Exception as error:  # of many types; the other kinds are checked nevertheless
            results = {"error": f"{type(error).__name__}: {error}"}
        # A line each, at once: what kills the process must not take along what was found.
        print("\n" + json.dumps({"kind": name, **results}), flush=True)


if __name__ == "__main__":
    main()
