"""The run-time support of dumped files: inputs, recorded or from a seeded generator, and the
comparison of outputs.
"""

import importlib
import math
import operator
import runpy
import sys
import types
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.fx.node import Argument

from atomc.weights.packed import concatenated
from atomc.weights.prepared import Attributes

# In the folder of a graph: inputs by name, and outputs, of one call.
RECORDED = "recorded.pt"
FIRST = "00_captured.py"
# Relative to the largest value: two stages may add up in different orders.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# With codes of at most eight bits: another order of additions may give the next code.
CODES_TOLERANCE = 0.1


@dataclass(frozen=True)
class Input:
    """A generated weight or input: the same values for the same name, in every file.

    below    integers are random below this; without it they are 0, 1, 2, ... along the last
             dimension
    strides  None: contiguous
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    below: int | None = None
    device: str = "cpu"
    strides: tuple[int, ...] | None = None

    def make(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = self._values(generator).to(self.dtype)
        if self.strides is not None:
            values = torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(values)
        return values.to(self.device)

    def _values(self, generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.ones(self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            if len(self.shape) < 2:  # norm weights, scales, frequencies: positive, around one
                return torch.rand(self.shape, generator=generator) + 0.5
            # A linear layer with these weights keeps the magnitude of its input.
            return torch.randn(self.shape, generator=generator) / math.sqrt(max(self.shape[-1], 1))
        below = self.below
        if below is None and self.dtype.itemsize == 1:  # packed weights
            below = 128
        if below is not None:
            return torch.randint(max(below, 1), self.shape, generator=generator)
        counted: Tensor = torch.arange(self.shape[-1] if self.shape else 1).expand(
            self.shape or (1,)
        )
        return counted.contiguous().view(self.shape)


@dataclass(frozen=True)
class Packed:
    """The tensors of these names, concatenated by rows, with so many rows of zeros after them."""

    names: tuple[str, ...]
    zero_rows: int = 0


@dataclass(frozen=True)
class Prepared:
    """A prepared weight: the tensors that module.function returns for the weights of these names
    and these attributes.
    """

    module: str
    function: str
    names: tuple[str | None, ...]
    attributes: Attributes = ()

    def make(self, made: Mapping[str, Argument]) -> tuple[Tensor, ...]:
        function = operator.attrgetter(self.function)(importlib.import_module(self.module))
        tensors: tuple[Tensor, ...] = function(
            *[None if name is None else made[name] for name in self.names], **dict(self.attributes)
        ).tensors
        return tensors


Recipe = Input | Packed | Prepared | Argument


class Recorded(TypedDict):
    """The content of the file RECORDED."""

    inputs: dict[str, Argument]
    outputs: Sequence[Argument]


def make(
    recipes: Mapping[str, Recipe], recorded: Mapping[str, Argument] | None = None
) -> dict[str, Argument]:
    """The inputs by name, recorded ones as copies; values that are not recipes are used as they
    are.
    """
    values: dict[str, Argument] = {}
    for name, recipe in recipes.items():
        if recorded is not None and name in recorded:
            value = recorded[name]
            values[name] = value.clone() if isinstance(value, Tensor) else value
            continue
        match recipe:
            case Input():
                values[name] = recipe.make(name)
            case Packed():
                tensors = [
                    part for each in recipe.names if isinstance(part := values[each], Tensor)
                ]
                values[name] = concatenated(tensors, recipe.zero_rows)
            case Prepared():
                values[name] = recipe.make(values)
            case _:
                values[name] = recipe
    return values


def run(forward: types.FunctionType, inputs: Mapping[str, Recipe]) -> None:
    """Call forward on the inputs, print each output, and compare the outputs with the recorded
    ones.

    Without recorded outputs, compare with those of the captured graph, 00_captured.py, for the same
    inputs. Exits with code 1 if they differ.
    """
    file = Path(forward.__code__.co_filename)
    recorded: Recorded | None = None
    if file.with_name(RECORDED).is_file():
        recorded = torch.load(file.with_name(RECORDED), weights_only=True)
    outputs = _outputs(forward, inputs, recorded)
    _print(outputs)
    if recorded is not None:
        expected, name = recorded["outputs"], "the recorded outputs"
    elif file.name != FIRST and file.with_name(FIRST).is_file():
        first = runpy.run_path(str(file.with_name(FIRST)))
        expected = _outputs(first["forward"], first["INPUTS"], None)
        name = f"the outputs of {FIRST}"
    else:
        return
    # With 8-bit weights or inputs, outputs may be codes.
    codes = any(
        isinstance(x, Input) and x.dtype.itemsize == 1 and x.dtype != torch.bool
        for x in inputs.values()
    )
    texts = [
        _mismatch(number, *pair, codes)
        for number, pair in enumerate(zip(outputs, expected, strict=True))
    ]
    far = list(filter(None, texts))
    print("\n".join(far) or f"reproduces {name}")
    if far:
        print(f"does not reproduce {name}")
        sys.exit(1)


def _print(outputs: Sequence[Argument]) -> None:
    checksum = 0.0
    for number, output in enumerate(outputs):
        if isinstance(output, Tensor):
            size = output.to(torch.float64).abs().mean().item() if output.numel() else 0.0
            checksum += size
            dtype = str(output.dtype).removeprefix("torch.")
            print(f"output {number}: {dtype}{list(output.shape)}, mean magnitude {size:.6g}")
        else:
            print(f"output {number}: {output!r}")
    print(f"checksum: {checksum:.6g}")


def _outputs(
    forward: types.FunctionType, inputs: Mapping[str, Recipe], recorded: Recorded | None
) -> Sequence[Argument]:
    with torch.inference_mode():
        outputs = forward(**make(inputs, recorded and recorded["inputs"]))
    return outputs if isinstance(outputs, tuple | list) else [outputs]


def _mismatch(number: int, actual: Argument, expected: Argument, codes: bool) -> str:
    """How an output differs from the expected one; "" if it does not."""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return "" if actual == expected else f"output {number}: {actual!r} instead of {expected!r}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return (
            f"output {number}: {actual.dtype}{list(actual.shape)} instead of "
            f"{expected.dtype}{list(expected.shape)}"
        )
    a, b = (x.to(torch.float64) for x in (actual, expected.to(actual.device)))
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return ""
    largest = float(torch.where(b.isfinite(), b, 0.0).abs().max())
    difference = float(torch.where(same, 0.0, a - b).abs().max())
    tolerance = CODES_TOLERANCE if codes else TOLERANCES.get(actual.dtype, 0.0)
    if difference <= tolerance * largest:
        return ""
    return f"output {number}: off by {difference:.3g}, the largest value is {largest:.3g}"
