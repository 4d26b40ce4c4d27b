"""Sums over AITER's group of processes, which here all hold the same tensors."""

from contextvars import ContextVar
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from stand_ins import stands_for
from stand_ins.memory import contiguous_view

PROCESSES: ContextVar[int] = ContextVar("PROCESSES", default=1)


@stands_for("aiter.dist.parallel_state")
def get_tp_group() -> SimpleNamespace:
    assert dist.is_initialized(), "tensor model parallel group is not initialized"
    return SimpleNamespace(device_group=dist.group.WORLD)


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
    return input_ if PROCESSES.get() == 1 else PROCESSES.get() * input_


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
    total = PROCESSES.get() * input_.float() + residual_inp_.float()
    rms = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    weight = contiguous_view(weight_, width).float() + (1.0 if gemma_norm else 0.0)
    return (total * rms * weight).to(input_.dtype), total.to(input_.dtype)
