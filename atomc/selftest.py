"""Does each kernel that could be used here compute what its op means? Tried on this machine, on small inputs.

`atomc doctor --self-test` prints the answers. The tests of the repository try far more inputs; this tells a broken driver,
library or compiler from a sound one, in seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomc import kernels
from atomc.examples import EXAMPLES, Arguments, Numbers
from atomc.op import REGISTRY, Kernel, Op, Refusal, refusal
from atomc.op_traits import Kind
from atomc.platform import Platform
from atomc.render.table import table

# One token, and more than the kernels for few tokens take.
ROWS = (1, 33)
DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float32, torch.bfloat16)}
# How far a result may be from the meaning in fp32, in roundings of its dtype: sums in another order, another exp.
ROUNDINGS = {torch.float32: 64.0, torch.bfloat16: 8.0, torch.float16: 8.0}
# Of codes of few bits, so many may be others: what is quantized is rounded in another order first.
OTHER_CODES = 0.02


@dataclass(frozen=True)
class Tried:
    """What became of one kernel. passed: None if there was nothing to try, and `said` is why.

    error  the largest, in roundings of the dtype, of all inputs tried
    """

    provider: str
    op: str
    layout: str | None
    passed: bool | None
    tried: int
    error: float
    said: str


def self_test(platform: Platform | None = None) -> Iterator[Tried]:
    """Each kernel of each op in turn, as it is tried."""
    here = platform or Platform.detect()
    for provider in (*kernels.PROVIDERS, kernels.INVARIANT):
        kernels.load(provider)
    for op in REGISTRY.values():
        for kernel in op.kernels:
            yield _try(op, kernel, here)


def _try(op: Op, kernel: Kernel, here: Platform) -> Tried:
    count, worst, reasons = 0, 0.0, list[str]()

    def told(passed: bool | None, said: str) -> Tried:
        return Tried(kernel.provider, op.name, kernel.layout, passed, count, worst, said)

    if op not in EXAMPLES:
        collective = Kind.COLLECTIVE in op.kind
        return told(None, "it needs several processes" if collective else "there is no example to try it on")
    for name, make in EXAMPLES[op].items():
        for dtype in DTYPES[here.device]:
            for rows in ROWS:
                where = ", ".join(part for part in (name, str(dtype).removeprefix("torch."), f"{rows} rows") if part)
                try:
                    given = make(Numbers(dtype, here.device, rows, kernel.layout or "paged"))
                    if (refused := refusal(kernel, here, given) or _beyond(kernel, rows)) is not None:
                        reasons.append(refused.text)
                        continue
                    count += 1
                    error = _error(op, kernel, make, Numbers(dtype, here.device, rows, kernel.layout or "paged"), given)
                except Exception as error_:  # whatever a kernel raises is what is asked for
                    return told(False, f"{where}: {type(error_).__name__}: {str(error_).strip().splitlines()[0]}")
                worst = max(worst, error)
                if not error <= ROUNDINGS[dtype]:
                    return told(False, f"{where}: {error:.3g} roundings off, {ROUNDINGS[dtype]:.0f} are allowed")
    if count:
        return told(True, "")
    return told(None, "refused: " + "; ".join(dict.fromkeys(reasons)))


def _beyond(kernel: Kernel, rows: int) -> Refusal | None:
    return None if rows in kernel.tokens else Refusal("tokens", f"is not meant for {rows} tokens")


def _error(op: Op, kernel: Kernel, make: Callable[[Numbers], Arguments], numbers: Numbers, given: Arguments) -> float:
    """The largest error of the kernel's results and of what it writes, in roundings. `given` is what `make` makes."""
    meant = _wide(make(numbers))
    truth = _tensors(op.reference(**meant)) + [meant[name] for name in op.mutates if meant.get(name) is not None]
    actual = _tensors(_run(kernel, given)) + [given[name] for name in op.mutates if given.get(name) is not None]
    if len(actual) != len(truth):
        raise ValueError(f"returned {len(actual)} tensors, the meaning {len(truth)}")
    return max([_distance(a, b, numbers.dtype) for a, b in zip(actual, truth, strict=True) if a.numel()], default=0.0)


def _run(kernel: Kernel, given: Arguments) -> Any:
    """The kernel's result, called as lowered code would."""
    arguments = dict(given)
    for names, prepare in kernel.prepare.items():
        weights = [given.get(name) for name in names]
        if weights[0] is not None:
            arguments[names[0]] = prepare(*weights).tensors
    if kernel.workspace is not None:
        device = next(x.device for x in given.values() if isinstance(x, Tensor))
        arguments["workspace"] = torch.empty(kernel.workspace(**given), dtype=torch.uint8, device=device)
    return kernel.function(**arguments)


def _wide(arguments: Arguments) -> Arguments:
    """In fp32, where the meaning rounds to nothing on its way; codes and caches of them stay."""
    wide = {name: x.float() if isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype.itemsize > 1 else x
            for name, x in arguments.items()}  # fmt: skip
    return wide | ({"out_dtype": torch.float32} if "out_dtype" in wide else {})


def _tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _distance(actual: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """In roundings of the dtype; infinite for another shape, for NaN, and for too many other codes."""
    if actual.shape != truth.shape:
        return float("inf")
    if actual.dtype.itemsize == 1:
        other = actual.view(torch.uint8) != truth.view(torch.uint8)
        return float("inf") if int(other.sum()) > max(2, OTHER_CODES * other.numel()) else 0.0
    size = truth.float().square().mean().sqrt()
    rounding = torch.finfo(actual.dtype if actual.dtype.is_floating_point else dtype).eps
    apart = (actual.float() - truth.float()).abs() / (max(rounding, torch.finfo(dtype).eps) * (truth.float().abs() + size))
    return float("inf") if bool(apart.isnan().any()) else float(apart.max())


def text(found: Sequence[Tried]) -> str:
    """A table: what failed first, then what passed, then why the others were not tried, by provider."""
    order = sorted(found, key=lambda one: (one.passed is not False, one.passed is None))
    rows = [(one.provider, one.op + (f" ({one.layout})" if one.layout else ""), _word(one.passed), str(one.tried),
             f"{one.error:.2g}" if one.passed else "", one.said) for one in order if one.passed is not None]  # fmt: skip
    parts = [table(("kernel", "op", "self-test", "inputs", "roundings", ""), rows, numbers=[3, 4])] if rows else []
    untried = [one for one in order if one.passed is None]
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in untried:
        reasons.setdefault((one.provider, one.said), []).append(one.op)
    if untried:
        parts.append(table(("kernel", "not tried", "why"), [(provider, f"{len(ops)} ops" if len(ops) > 1 else ops[0], why)
                                                           for (provider, why), ops in reasons.items()]))  # fmt: skip
    failed = sum(one.passed is False for one in found)
    passed = sum(one.passed is True for one in found)
    return "\n\n".join([*parts, f"{passed} kernels passed, {failed} failed, {len(untried)} were not tried"])


def _word(passed: bool | None) -> str:
    return "passed" if passed else "FAILED"
