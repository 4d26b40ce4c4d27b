"""Processes that run models together over gloo, for tests/parallel/test_tensor_parallel.py: every case runs
on each of them, and leaves its result in a file.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tiny_models import SIZES
from torch import Tensor, distributed, nn

import atomc
from atomc.loading.create_model import create_model
from atomc.parallel.process_group import TensorParallel
from atomc.runtime.execution.views.hidden_states import WithHiddenStates, layer_inputs
from atomc.stock.adapter import wrap_stock

TINY = SIZES | dict(num_hidden_layers=2, pad_token_id=0, eos_token_id=0)
IDS = torch.randint(0, 96, (7,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(7)
STRICT: dict[str, Any] = {"strict": True, "glue": "eager"}


class Case(NamedTuple):
    """differs  from TINY
    kind     "ours", "stock": a class of transformers behind our forward, "transformers": as it is
    scheme   of quantized weights
    states   decoder layers whose inputs are results, too
    """

    model_type: str
    kind: str = "ours"
    differs: Mapping[str, Any] = {}
    ep: bool = False
    compiles: bool = False
    scheme: str = ""
    states: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [self.kind, self.model_type, *(f"{k} {v}" for k, v in self.differs.items())]
        words += ["ep"] * self.ep + ["hidden states"] * bool(self.states)
        return " ".join([*words, self.scheme]).strip()


class Result(NamedTuple):
    """Of one rank. held: the elements of its parameters; num_ops: of the compiled graph."""

    eager: Tensor
    compiled: Tensor | None
    num_ops: Mapping[str, int]
    held: int


def whole(case: Case) -> nn.Module:
    """The model of a case with all its parameters, the same in each process."""
    config = transformers.AutoConfig.for_model(case.model_type, **(TINY | dict(case.differs)))
    hf_model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(hf_model)
    hf_model.eval().requires_grad_(False)
    if case.kind == "transformers":
        return hf_model
    if case.kind == "stock":
        model: nn.Module = wrap_stock(hf_model)
    else:
        given = {**config.to_dict(), "architectures": [type(hf_model).__name__]}
        model = create_model(given).eval().requires_grad_(False)
        fill(model)
    return atomc.quantize(model, case.scheme) if case.scheme else model


def fill(model: nn.Module) -> None:
    """Random weights, large enough that every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        weight.data.normal_(mean, 0.15, generator=generator)


class WithJoinedStates(nn.Module):
    """The logits, and the inputs of some decoder layers behind them."""

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        super().__init__()
        self.view = WithHiddenStates(model, layer_inputs(model, layers))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return torch.cat(self.view(input_ids, positions, positions), -1)


def view(case: Case, model: nn.Module) -> nn.Module:
    return WithJoinedStates(model, case.states) if case.states else model


def logits(model: Callable[..., Any]) -> Tensor:
    with torch.inference_mode():
        if isinstance(getattr(model, "_orig_mod", model), transformers.PreTrainedModel):
            out: Tensor = model(IDS[None], use_cache=False).logits[0]
        else:
            out = model(IDS, POSITIONS)
        return out


def result(case: Case, model: nn.Module) -> Result:
    eager, held = logits(model), sum(weight.numel() for weight in model.parameters())
    if not case.compiles:
        return Result(eager, None, {}, held)
    torch._dynamo.reset()
    atomc.prepare(model)
    compiled = logits(torch.compile(model, backend="atom", options=STRICT))
    report = atomc.reports()[-1]
    assert report.treated, report.why_not
    return Result(eager, compiled, dict(report.num_ops), held)


def run(rank: int, ranks: int, folder: Path, cases: list[Case]) -> None:
    """Writes a file <number>-<rank>.pt with the result or the traceback of each case."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    assert distributed.group.WORLD is not None
    place = TensorParallel.of(distributed.group.WORLD)
    for number, case in enumerate(cases):
        try:
            out: Any = tuple(
                result(case, view(case, atomc.parallelize(whole(case), place, ep=case.ep)))
            )
        except Exception:  # of any kind: the test of the case shows it
            out = traceback.format_exc()
        torch.save(out, folder / f"{number}-{rank}.pt")
    distributed.destroy_process_group()
