"""Ranks that each have some of the experts, compiled for gfx950 with the stand-ins of MORI and of
AITER, for test_aiter_mori.py: each leaves what it saw in a file.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mori_stand_in
import pytest
import stand_ins
import torch
from kernel_cases.draw import Draw
from kernel_cases.experts import fp8, fp8_block, full
from tiny_experts import random_model
from torch import Tensor, distributed, nn

import atomc
from atomc import ops
from atomc.backend import compile_graph
from atomc.kernels.mori import exchange
from atomc.ops import GroupStep, Step
from atomc.options import Options
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.sharding import Sharding
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.runtime.config import EngineConfig
from atomc.runtime.ranks import process_group
from atomc.torch_compat import peer_memory

HERE = replace(Platform.named("gfx950"), device="cpu", here=True)
RANKS, EXPERTS, NOWHERE, NONE = 2, 6, -1, -1
OWNERS = torch.tensor([0, 1, 1, 0, 0, 1])
# Those of two of four ranks, where each pair of ranks has the same tokens.
OWNERS_IN_PAIR = torch.tensor([0, 1, 1, NONE, 0, NONE])
SIZES: dict[str, Any] = {"hidden": 128, "inner": 256, "experts": EXPERTS}
SCHEMES = {"none": full, "fp8": fp8, "fp8_block": fp8_block}


# Of a model that the runtime compiles.
SERVED = (None, "fp8_per_token", "fp8_block")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 128}
TOKENS, BLOCK = 3, 16


class Case(NamedTuple):
    """tokens  of each rank
    chosen  the experts that tokens may choose, or None: all
    paired  whether other ranks have some of the experts
    """

    tokens: int
    scheme: str = "none"
    chosen: tuple[int, ...] | None = None
    paired: bool = False

    @property
    def owners(self) -> Tensor:
        return OWNERS_IN_PAIR if self.paired else OWNERS


CASES = [
    *(Case(tokens) for tokens in (17, 5, 1, 0)),
    Case(5, chosen=(1, 2)),  # all tokens travel to the second rank
    Case(3, chosen=(0, 4)),
    Case(5, paired=True),
    *(Case(tokens, scheme) for tokens in (7, 1) for scheme in ("fp8", "fp8_block")),
]


def operands(case: Case) -> dict[str, Any]:
    """Of all ranks and all experts: the arguments of the op of the scheme, with x in bf16."""
    values = SCHEMES[case.scheme](Draw(torch.bfloat16), tokens=RANKS * case.tokens, **SIZES)
    values["x"] = Draw(torch.bfloat16).normal(RANKS * case.tokens, SIZES["hidden"])
    if case.chosen is not None:
        values["ids"] = torch.tensor(case.chosen, dtype=torch.int32)[
            values["ids"] % len(case.chosen)
        ]
    return values


def places(owners: Tensor, rank: int) -> Tensor:
    """Those of dispatch_tokens."""
    per_rank = EXPERTS // RANKS
    rows_here = torch.full_like(owners, NOWHERE)
    numbers = torch.full_like(owners, (rank + 1) * per_rank - 1)
    for owner in range(RANKS):
        rows = torch.arange(int((owners == owner).sum()))
        numbers[owners == owner] = owner * per_rank + rows
        if owner == rank:
            rows_here[owners == owner] = rows
    return torch.stack((rows_here, numbers))


class Layer(nn.Module):
    """The experts of one rank, between the ops that send."""

    def __init__(self, case: Case, rank: int, group: str, values: dict[str, Any]) -> None:
        super().__init__()
        self.scheme, self.group = case.scheme, group
        self.register_buffer("places", places(case.owners, rank))
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            part = values[name][case.owners == rank] if name in values else None
            self.register_parameter(
                name, None if part is None else nn.Parameter(part, requires_grad=False)
            )

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        places = self.get_buffer("places")
        tokens, ids, weights, _ = ops.dispatch_tokens(
            x, ids, weights, places, NOWHERE, RANKS, self.group
        )
        results = experts(self.scheme, tokens, ids, weights, **dict(self.named_parameters()))
        return ops.combine_tokens(results, ids, RANKS, self.group)


def experts(scheme: str, x: Tensor, ids: Tensor, weights: Tensor, **stored: Tensor) -> Tensor:
    if scheme == "none":
        return ops.moe_experts(x, ids, weights, **stored)
    if scheme == "fp8":
        codes, scale, block = *ops.quant_fp8_per_token(x), 0
    else:
        codes, scale, block = *ops.quant_fp8_group(x), 128
    return ops.moe_experts_fp8(codes, scale, ids, weights, out_dtype=x.dtype, block=block, **stored)


def result(case: Case, rank: int, group: str) -> tuple[Tensor, dict[str, str]]:
    """Of the tokens of this rank, and who served each op."""
    values = operands(case)
    tokens_of_rank = slice(rank * case.tokens, (rank + 1) * case.tokens)
    layer = Layer(case, rank, group, values)
    options = Options.of({"glue": "eager", "strict": True})
    platform = replace(HERE, peer_groups=peer_memory.reasons())
    torch._dynamo.reset()
    compiled = torch.compile(
        layer, backend=partial(compile_graph, options=options, platform=platform), dynamic=False
    )
    with torch.no_grad():
        out = compiled(*(values[name][tokens_of_rank] for name in ("x", "ids", "weights")))
    return out, {choice.op: choice.chosen for choice in atomc.reports()[-1].kernels}


def served(scheme: str | None, place: TensorParallel | None) -> tuple[Tensor, dict[str, str]]:
    """Logits of a Qwen3-MoE that the runtime compiles, whole, or with the experts of a rank; and who
    served each op. The second rank has no tokens, and computes padding.
    """
    # Of a second layer, rounding another sum gives other codes.
    layers = 2 if scheme is None else 1
    model = random_model("qwen3_moe", torch.bfloat16, **WIDE, num_hidden_layers=layers)
    if scheme is not None:
        atomc.quantize(model, scheme)
    if place is not None:
        sharding = Sharding.of_experts(model, place)
        sharding.cut()
        sharding.connect()
    providers = ("aiter", "mori", "torch")
    options = {"glue": "eager", "cache": False, "strict": True, "providers": providers}
    platform = replace(HERE, peer_groups=peer_memory.reasons())
    program = compile_model(model, options, platform=platform, owned=True)
    program.bind([spec.allocate(TOKENS, BLOCK, "cpu") for spec in program.specs])
    rows = torch.arange(TOKENS)
    idle = place is not None and place.rank > 0
    step = Step(
        0 * rows if idle else 3 + 7 * rows,
        0 * rows,
        torch.arange(TOKENS + 1, dtype=torch.int32) * (not idle),
        torch.full((TOKENS,), int(not idle), dtype=torch.int32),
        rows,
        (GroupStep(rows * 0 - 1 if idle else rows * BLOCK, rows.int().unsqueeze(1)),),
        0 * rows,
    )
    with torch.no_grad():
        return program(step), {choice.op: choice.chosen for choice in program.report.kernels}


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    mori_stand_in.install(pytest.MonkeyPatch())
    with (
        stand_ins.installed("gfx950") as called,
        mock.patch.object(process_group, "_on_rocm", lambda: True),
    ):
        lacking = mock.patch.object(exchange, "missing", lambda: "not installed" if rank else None)
        with lacking, joined(rank, folder / "lacking") as place:
            seen["why not"] = dict(peer_memory.reasons())[place.group]
            seen["without"] = attempted(lambda: result(CASES[1], rank, place.group))
        with joined(rank, folder / "unwanted", providers=("aiter", "torch")):
            seen["unwanted"] = peer_memory.reasons()
        with joined(rank, folder / "store") as place:
            for case in CASES:
                seen[str(case)] = attempted(lambda case=case: result(case, rank, place.group))
            for scheme in SERVED:
                called.clear()
                seen[str(scheme)] = attempted(lambda scheme=scheme: served(scheme, place))
                seen[f"called for {scheme}"] = {*called}
        seen["left"] = mori_stand_in.CONNECTED, peer_memory.reasons()
    torch.save(seen, folder / f"{rank}.pt")


@contextlib.contextmanager
def joined(rank: int, store: Path, providers: tuple[str, ...] = ()) -> Iterator[TensorParallel]:
    """Inside, the runtime's ranks are in a group; the place of this one."""
    config = EngineConfig(device="cpu", dp=RANKS, ep=True, options={"providers": providers})
    file = distributed.FileStore(str(store), RANKS)
    place = process_group.join(file, rank, torch.device("cpu"), config)
    assert place.experts is not None
    try:
        yield place.experts
    finally:
        distributed.barrier()
        process_group.leave()


def attempted(call: Callable[[], Any]) -> Any:
    """Its result, or the traceback of its error."""
    try:
        return call()
    except Exception:
        return traceback.format_exc()
