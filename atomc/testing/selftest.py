"""Self-test: compares each kernel that is available on this machine with the reference of its op,
on small inputs.

`atomc doctor --self-test` prints the results. It takes seconds and finds a broken driver, library
or compiler; the tests of the repository use far more inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc import kernels
from atomc.errors import first_line
from atomc.ops.op import REGISTRY, Kernel, Op, Refusal, Results, refusal
from atomc.ops.op_traits import Kind
from atomc.platform import Platform
from atomc.report.records import grouped_by
from atomc.report.render.table import table
from atomc.testing.examples import EXAMPLES
from atomc.testing.layouts import plain_order_kernel
from atomc.testing.random_inputs import Argument, Arguments, RandomInputs

# One token, and more than the kernels for few tokens accept.
ROWS = (1, 33)
DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float32, torch.bfloat16)}
# Tolerance against the reference in fp32, in units of eps of the dtype: other orders of sums,
# another exp.
ROUNDINGS = {torch.float32: 64.0, torch.bfloat16: 8.0, torch.float16: 8.0}
# The fraction of quantized codes that may differ: their inputs may be rounded in another order.
OTHER_CODES = 0.02


@dataclass(frozen=True)
class KernelResult:
    """The result for one kernel. passed: None if it was not run; `said` is the reason.

    error  the largest of all inputs, in units of eps of the dtype
    """

    provider: str
    op: str
    layout: str | None
    passed: bool | None
    tried: int
    error: float
    said: str


def self_test(platform: Platform | None = None) -> Iterator[KernelResult]:
    """The result of each kernel of each op, one after another."""
    here = platform or Platform.detect()
    for provider in (*kernels.PROVIDERS, kernels.INVARIANT):
        kernels.load(provider)
    for op in REGISTRY.values():
        for kernel in op.kernels:
            yield _try(op, kernel, here)


def _try(op: Op, kernel: Kernel, here: Platform) -> KernelResult:
    count, worst, reasons = 0, 0.0, list[str]()

    def result(passed: bool | None, said: str) -> KernelResult:
        return KernelResult(kernel.provider, op.name, kernel.layout, passed, count, worst, said)

    if op not in EXAMPLES:
        collective = Kind.COLLECTIVE in op.kind
        return result(
            None, "it needs several processes" if collective else "there is no example to try it on"
        )
    for name, make in EXAMPLES[op].items():
        for dtype in DTYPES[here.device]:
            for rows in ROWS:
                where = ", ".join(
                    part
                    for part in (name, str(dtype).removeprefix("torch."), f"{rows} rows")
                    if part
                )
                try:
                    arguments = make(
                        RandomInputs(dtype, here.device, rows, kernel.layout or "paged")
                    )
                    if (
                        refused := refusal(kernel, here, arguments) or _token_refusal(kernel, rows)
                    ) is not None:
                        reasons.append(refused.text)
                        continue
                    count += 1
                    numbers = RandomInputs(dtype, here.device, rows, kernel.layout or "paged")
                    error = _error(op, kernel, make, numbers, arguments)
                except Exception as error_:  # any exception of a kernel is a result of the test
                    return result(
                        False,
                        f"{where}: {type(error_).__name__}: {first_line(error_)}",
                    )
                worst = max(worst, error)
                if not error <= ROUNDINGS[dtype]:
                    return result(
                        False,
                        f"{where}: {error:.3g} roundings off, {ROUNDINGS[dtype]:.0f} are allowed",
                    )
    if count:
        return result(True, "")
    return result(None, "refused: " + "; ".join(dict.fromkeys(reasons)))


def _token_refusal(kernel: Kernel, rows: int) -> Refusal | None:
    return None if rows in kernel.tokens else Refusal("tokens", f"it is not used for {rows} tokens")


def _error(
    op: Op,
    kernel: Kernel,
    make: Callable[[RandomInputs], Arguments],
    numbers: RandomInputs,
    given: Arguments,
) -> float:
    """The largest error of the kernel's results and written tensors, in units of eps. `given`: the
    result of `make`.
    """
    meant = _upcast(make(numbers))
    truth = _tensors(op.reference(**meant)) + _written(op, meant)
    actual = _tensors(_run(kernel, given)) + _written(op, given)
    if len(actual) != len(truth):
        raise ValueError(f"returned {len(actual)} tensors, the reference {len(truth)}")
    return max(
        [_distance(a, b, numbers.dtype) for a, b in zip(actual, truth, strict=True) if a.numel()],
        default=0.0,
    )


def _written(op: Op, arguments: Arguments) -> list[Tensor]:
    """The tensors that the op has written."""
    return [x for name in op.mutates if isinstance(x := arguments.get(name), Tensor)]


def _run(kernel: Kernel, given: Arguments) -> Results:
    """The result of the kernel, called as lowered code calls it."""
    arguments: dict[str, Argument | tuple[Tensor, ...]] = {**given, **kernel.prepared(given)}
    if kernel.workspace is not None:
        device = next(x.device for x in given.values() if isinstance(x, Tensor))
        arguments["workspace"] = torch.empty(
            kernel.workspace(**given), dtype=torch.uint8, device=device
        )
    if kernel.shared is not None:
        arguments["shared"] = kernel.shared.of(given)
    return plain_order_kernel(kernel).function(**arguments)


def _upcast(arguments: Arguments) -> Arguments:
    """The arguments in fp32, so that the reference does not round; quantized codes are
    unchanged.
    """
    wide = {
        name: x.float()
        if isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype.itemsize > 1
        else x
        for name, x in arguments.items()
    }
    return wide | ({"out_dtype": torch.float32} if "out_dtype" in wide else {})


def _tensors(result: Results) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _distance(actual: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """The error in units of eps; infinite for another shape, NaN, or too many different codes."""
    if actual.shape != truth.shape:
        return float("inf")
    if actual.dtype.itemsize == 1:
        other = actual.view(torch.uint8) != truth.view(torch.uint8)
        return float("inf") if int(other.sum()) > max(2, OTHER_CODES * other.numel()) else 0.0
    size = truth.float().square().mean().sqrt()
    rounding = torch.finfo(actual.dtype if actual.dtype.is_floating_point else dtype).eps
    unit = max(rounding, torch.finfo(dtype).eps) * (truth.float().abs() + size)
    error = (actual.float() - truth.float()).abs() / unit
    return float("inf") if bool(error.isnan().any()) else float(error.max())


def text(found: Sequence[KernelResult]) -> str:
    """Tables of failed, then passed kernels, then of those that were not run, with the reason, by
    provider.
    """
    order = sorted(found, key=lambda one: (one.passed is not False, one.passed is None))
    rows = [
        (
            one.provider,
            one.op + (f" ({one.layout})" if one.layout else ""),
            "passed" if one.passed else "FAILED",
            str(one.tried),
            f"{one.error:.2g}" if one.passed else "",
            one.said,
        )
        for one in order
        if one.passed is not None
    ]
    parts = (
        [table(("kernel", "op", "self-test", "inputs", "roundings", ""), rows, numbers=[3, 4])]
        if rows
        else []
    )
    untried = [one for one in order if one.passed is None]
    reasons = grouped_by(lambda one: (one.provider, one.said), untried)
    if untried:
        parts.append(
            table(
                ("kernel", "not tried", "why"),
                [
                    (provider, f"{len(results)} ops" if len(results) > 1 else results[0].op, why)
                    for (provider, why), results in reasons.items()
                ],
            )
        )
    failed = sum(one.passed is False for one in found)
    passed = sum(one.passed is True for one in found)
    return "\n\n".join(
        [*parts, f"{passed} kernels passed, {failed} failed, {len(untried)} were not tried"]
    )
