"""Ways in which models write what atomc has an op for: one module per family, with its rows in
`SPELLINGS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

# What a spelling may differ from eager by, in units of the largest value: eager rounds every step
# between, the op only its result.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}


@dataclass(frozen=True)
class Spelling:
    """One way to write an op.

    text       the spelling, as it stands in the table: code on one line
    models     models or libraries that write so, for the table
    rewrite    what recognizes it, or names a near miss
    function   (*inputs) -> result
    inputs     dtype -> the inputs; sizes are odd
    sites      of the rewrite that must be found, if there is no reason
    reason     why it stays out: a pattern for the sentence of the near miss; "" if it is found
    table      that reason in the table
    dtypes     that it is tested in
    tolerance  the largest difference to eager, if not as `TOLERANCE`
    """

    text: str
    models: str
    rewrite: str
    function: Callable[..., Any]
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]
    sites: int = 1
    reason: str = ""
    table: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    tolerance: float | None = None


def families() -> dict[str, tuple[Spelling, ...]]:
    """Name of the module -> its spellings, in the order of the table."""
    names = sorted(module.name for module in iter_modules(__path__))
    return {name: import_module(f"spellings.{name}").SPELLINGS for name in names}


def row(spelling: Spelling) -> str:
    """The row of a spelling in docs/rewrites.md."""
    found = f"no: {spelling.table}" if spelling.reason else f"`{spelling.rewrite}`"
    return f"| `{spelling.text}` | {spelling.models} | {found} |"


def table() -> str:
    """The table of docs/rewrites.md."""
    lines = ["| spelling | written by | recognized as |", "|---|---|---|"]
    for found in families().values():
        lines += map(row, found)
    return "\n".join(lines) + "\n"
