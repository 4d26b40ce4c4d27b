"""AITER's groups of processes, and sums over the group of a stage. Until it is made, PROCESSES are
played, which all hold the same tensors.
"""

from contextvars import ContextVar
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from stand_ins import stands_for
from stand_ins.memory import check, contiguous_view

PROCESSES: ContextVar[int] = ContextVar("PROCESSES", default=1)
# "world" and "tp", as soon as they are made.
GROUPS: dict[str, dist.ProcessGroup] = {}


@stands_for("aiter.dist.parallel_state")
def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    data_parallel_size: int = 1,
    data_parallel_rank: int = 0,
) -> None:
    """Of a default group that exists, its sizes are taken, and not the arguments."""
    if not dist.is_initialized():
        raise NotImplementedError("a default group that AITER joins")
    if "world" in GROUPS:
        message = "world group already initialized with a different world size"
        check(GROUPS["world"].size() == dist.get_world_size(), message)
        return
    GROUPS["world"] = dist.new_group([*range(dist.get_world_size())], backend=backend)


@stands_for("aiter.dist.parallel_state")
def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    data_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    custom_group_config: dict[str, list[int]] | None = None,
) -> None:
    """Ranks of a stage are neighbours; every rank makes the groups of all of them."""
    assert "world" in GROUPS, "world group is not initialized"
    size = tensor_model_parallel_size
    check(dist.get_world_size() == size * pipeline_model_parallel_size, "another world size")
    if "tp" in GROUPS:
        check(GROUPS["tp"].size() == size, "tensor parallel group already initialized")
        return
    for first in range(0, dist.get_world_size(), size):
        ranks = [*range(first, first + size)]
        group = dist.new_group(ranks, backend=backend)
        if dist.get_rank() in ranks:
            GROUPS["tp"] = group


@stands_for("aiter.dist.parallel_state")
def destroy_model_parallel() -> None:
    if "tp" in GROUPS:
        dist.destroy_process_group(GROUPS.pop("tp"))


@stands_for("aiter.dist.parallel_state")
def destroy_distributed_environment() -> None:
    """Also destroys the default group."""
    if "world" in GROUPS:
        dist.destroy_process_group(GROUPS.pop("world"))
    if dist.is_initialized():
        dist.destroy_process_group()


@stands_for("aiter.dist.parallel_state")
def get_tp_group() -> SimpleNamespace:
    assert dist.is_initialized(), "tensor model parallel group is not initialized"
    return SimpleNamespace(device_group=GROUPS.get("tp", dist.group.WORLD))


def _sum(x: Tensor) -> Tensor:
    """Of all processes, in fp32."""
    if "tp" not in GROUPS:
        return PROCESSES.get() * x.float()
    total = x.float()
    total = total.clone() if total is x else total
    dist.all_reduce(total, group=GROUPS["tp"])
    return total


@stands_for("aiter.dist.communication_op")
def tensor_model_parallel_all_reduce(
    input_: Tensor,
    use_new: bool = True,
    open_fp8_quant: bool = False,
    prefill_support: bool = False,
) -> Tensor:
    """The sum in a new tensor; of one process the input itself. open_fp8_quant sends codes."""
    flags = (use_new, open_fp8_quant, prefill_support)
    if not all(isinstance(flag, bool) for flag in flags) or open_fp8_quant:
        raise NotImplementedError(f"only the exact sum is played, not {flags}")
    floats = (torch.float32, torch.float16, torch.bfloat16)
    check(input_.dtype in floats, "custom allreduce only supports float32, float16 and bfloat16")
    processes = GROUPS["tp"].size() if "tp" in GROUPS else PROCESSES.get()
    return input_ if processes == 1 else _sum(input_).to(input_.dtype)


@stands_for("aiter.dist.communication_op")
def tensor_model_parallel_fused_allreduce_rmsnorm(
    input_: Tensor,
    residual_inp_: Tensor,
    weight_: Tensor,
    eps: float,
    prefill_support: bool = False,
    x_pad_to_multiple: int = 0,
    gemma_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of the sum of all inputs and of the residual, times weight (gemma_norm: 1 +
    weight), and that sum. Computed in fp32, rounded once; rows [.., N], weight [N].
    """
    if x_pad_to_multiple:
        raise NotImplementedError("padding")
    width = weight_.numel()
    if input_.shape[-1] < width or residual_inp_.shape[-1] != width:
        raise RuntimeError("fused_allreduce_rmsnorm requires residual width == weight width")
    if not input_.is_contiguous() or not residual_inp_.is_contiguous():
        raise RuntimeError("the fused kernel reads rows one behind the other")
    total = _sum(input_) + residual_inp_.float()
    rms = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    weight = contiguous_view(weight_, width).float() + (1.0 if gemma_norm else 0.0)
    return (total * rms * weight).to(input_.dtype), total.to(input_.dtype)
