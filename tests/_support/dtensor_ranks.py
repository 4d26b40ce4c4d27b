"""Processes that compile models of DTensors over gloo, for tests/compiler/test_dtensors.py: every case runs on
each of them, and leaves what it returns in a file.
"""

import os
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tensor_parallel_ranks import IDS, STRICT, Case, logits, whole
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import atomc

LAYERS = 1
SMALL = {"num_hidden_layers": LAYERS}
BIASES = SMALL | {"attention_bias": True, "mlp_bias": True}
MOE = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA = Case("llama", "transformers", SMALL)
Result = dict[str, Any]


# ---- models of transformers


def loaded(case: Case, folder: Path, **config: Any) -> nn.Module:
    """The model as transformers divides it when it is loaded."""
    path = folder / f"{case}{sorted(config)}".replace(" ", "_")
    if distributed.get_rank() == 0:
        whole(case).save_pretrained(path)
    distributed.barrier()
    plan = transformers.distributed.DistributedConfig(tp_plan="auto", **config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=plan
    )
    return model.eval().requires_grad_(False)


def divided(case: Case, **head: Any) -> nn.Module:
    """The model as parallelize_module divides it. head: of the plan of the head."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(**{"output_layouts": Replicate(), **head}),
    }
    for layer in range(LAYERS):
        inside = f"model.layers.{layer}"
        plan |= {
            f"{inside}.self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")
        } | {
            f"{inside}.self_attn.o_proj": RowwiseParallel(),
            f"{inside}.mlp.gate_proj": ColwiseParallel(),
            f"{inside}.mlp.up_proj": ColwiseParallel(),
            f"{inside}.mlp.down_proj": RowwiseParallel(),
        }
    return parallelize_module(whole(case), mesh(), plan)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def of_model(model: nn.Module, **options: Any) -> Result:
    """Logits before and after torch.compile."""
    eager = gathered(logits(model))
    compiled = gathered(logits(torch.compile(model, backend="atom", options=STRICT | options)))
    return {"eager": eager, "compiled": compiled} | reported()


def gathered(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def reported() -> Result:
    report = atomc.reports()[-1]
    return {"num_ops": dict(report.num_ops), "treated": report.treated, "why_not": report.why_not}


def greedy(model: Callable[..., Any]) -> Tensor:
    """Tokens, in a text that grows."""
    ids = IDS[None]
    for _ in range(4):
        with torch.inference_mode():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0]


def generated(case: Case) -> Result:
    """The tokens of a model before and after torch.compile, prepared and with dynamic sizes."""
    model = divided(case)
    eager = greedy(model)
    atomc.prepare(model)
    compiled = greedy(torch.compile(model, backend="atom", options=STRICT, dynamic=True))
    return {"eager": eager, "compiled": compiled} | reported()


# ---- small programs


class Block(nn.Module):
    """A norm, and an MLP that is added to its input."""

    def __init__(self, *, bias: bool = False):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)
        self.out = nn.RMSNorm(16)
        for name, weight in self.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            weight.data.normal_(float("norm" in name), 0.3, generator=generator)
        self.requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        """What is done with the sum."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.between(self.down(F.silu(self.up(self.norm(x))))))


class Scaled(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * 0.5


X = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


def of_block(block: Block, plan: Mapping[str, ParallelStyle], part: bool = False) -> Result:
    """The result on one process, and that of its parts.

    part  each process has some of the rows
    """
    with torch.inference_mode():
        expected = block(X)
        rows = slice(None)
        if part:
            rows = slice(3 * distributed.get_rank(), 3 * distributed.get_rank() + 3)
        parallelize_module(block, mesh(), dict(plan))
        eager = block(X[rows])
        compiled = torch.compile(block, backend="atom", options=STRICT)(X[rows])
    return {"expected": expected[rows], "eager": eager, "compiled": compiled} | reported()


def all_of_dtensors() -> Result:
    """Inputs, weights and results are DTensors; the result has the layout of eager."""
    where = mesh()
    weight = distribute_tensor(torch.arange(64.0).view(8, 8) / 64, where, [Shard(1)])
    x = distribute_tensor(X[:, :8].contiguous(), where, [Shard(1)])

    def function(x: DTensor, weight: DTensor) -> Any:
        return F.silu(F.linear(x, weight) + 1)

    with torch.inference_mode():
        eager = function(x, weight)
        compiled = torch.compile(function, backend="atom", options=STRICT)(x, weight)
    return {
        "eager": eager.full_tensor(),
        "compiled": compiled.full_tensor(),
        "placements": (str(eager.placements), str(compiled.placements)),
        "types": (type(eager).__name__, type(compiled).__name__),
    } | reported()


def weights_change() -> Result:
    """The compiled model reads weights that were written after it was compiled."""
    with torch.inference_mode():
        block = parallelize_module(Block(), mesh(), dict(TENSOR))
        compiled = torch.compile(block, backend="atom", options=STRICT)
        before = compiled(X)
        for weight in (block.up.weight, block.down.weight):
            weight.mul_(1.5)
        return {"before": before, "eager": block(X), "compiled": compiled(X)} | reported()


def refused(function: Callable[..., Any], *args: Any, **options: Any) -> Result:
    """The first line of why a program is not compiled."""
    try:
        with torch.inference_mode():
            torch.compile(function, backend="atom", options=STRICT, **options)(*args)
    except Exception as error:  # Dynamo raises another class
        return {"error": str(error)} | reported()
    return {"error": ""}


def under_autocast() -> Result:
    block = parallelize_module(Block(), mesh(), dict(TENSOR))

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    return refused(function, X)


def dynamic_dtensor() -> Result:
    x = distribute_tensor(X, mesh(), [Shard(1)])
    return refused(lambda x: x + 1, x, dynamic=True)


def falls_back() -> Result:
    """What is refused is compiled by Inductor."""
    block = parallelize_module(Block(), mesh(), dict(TENSOR))

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    with torch.inference_mode():
        compiled = torch.compile(function, backend="atom", options={"strict": False})(X)
        return {"eager": function(X), "compiled": compiled} | reported()


Programs = dict[str, Callable[[Path], Result]]
PER_CHANGE: Programs = {
    "sum and norm": lambda folder: of_block(Block(), TENSOR),
    "all of DTensors": lambda folder: all_of_dtensors(),
    "weights change": lambda folder: weights_change(),
}
ROTATING: Programs = {
    "transformers": lambda folder: of_model(loaded(LLAMA, folder)),
    "parallelize_module": lambda folder: of_model(divided(LLAMA)),
    "biases": lambda folder: of_block(Block(bias=True), TENSOR),
    "scaled sum": lambda folder: of_block(Scaled(), TENSOR),
    "sequence": lambda folder: of_block(Block(), SEQUENCE, part=True),
    "autocast": lambda folder: under_autocast(),
    "dynamic DTensor": lambda folder: dynamic_dtensor(),
}
SLOW: Programs = {
    "transformers, biases": lambda folder: of_model(
        loaded(Case("llama", "transformers", BIASES), folder)
    ),
    "transformers, qwen3_moe": lambda folder: of_model(
        loaded(Case("qwen3_moe", "transformers", MOE), folder)
    ),
    "transformers, qwen3_moe by expert": lambda folder: of_model(
        loaded(Case("qwen3_moe", "transformers", MOE), folder, enable_expert_parallel=True)
    ),
    "parallelize_module, biases": lambda folder: of_model(
        divided(Case("llama", "transformers", BIASES))
    ),
    "parallelize_module, DTensor of logits": lambda folder: of_model(
        divided(LLAMA, output_layouts=Shard(-1), use_local_output=False)
    ),
    "generated": lambda folder: generated(LLAMA),
    "falls back": lambda folder: falls_back(),
}


def run(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    """Writes a file <name>-<rank>.pt with the result or the traceback of each program."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    for name in names:
        torch._dynamo.reset()
        try:
            out: Any = (PER_CHANGE | ROTATING | SLOW)[name](folder)
        except Exception:  # of any kind: the test of the program shows it
            out = traceback.format_exc()
        torch.save(out, folder / f"{name}-{rank}.pt")
    distributed.destroy_process_group()
