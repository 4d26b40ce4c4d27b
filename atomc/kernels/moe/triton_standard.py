"""Experts of the standard format with the Triton kernels of kernels/triton/experts/grouped.py."""

import importlib.util
from functools import partial

import torch
from torch import Tensor

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Spaces
from atomc.kernels.moe.layer import ExpertsConfig, RankExperts


def no_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        return "Triton kernels run on a GPU; on a CPU only interpreted, with TRITON_INTERPRET=1"
    return None


def unfit_block(name: str, config: ExpertsConfig, multiple: int) -> str | None:
    """Refuse squares of weights that a tile of the kernels would cross."""
    block = config.scheme.block
    if block % multiple:
        return f"{name} supports fp8 blocks of multiples of {multiple}, not of {block}"
    return None


class Triton(ExpertsKernel):
    """Rows sorted by expert in blocks, gathered products, of which the first gates its results, and
    a sum in a fixed order. The kernels allocate their results. Nothing waits for the host.
    """

    name = "triton"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        return no_triton(device)

    def refuse_config(self, config: ExpertsConfig) -> str | None:
        return unfit_block(self.name, config, 128)

    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        # Triton is optional.
        from atomc.kernels.moe.triton_quantizers import quantize
        from atomc.kernels.triton.experts.experts_prefill import sum_of_experts
        from atomc.kernels.triton.launch.tiles import MOE_EXPERTS, MOE_EXPERTS_8_BITS

        w, scheme = experts.weights, experts.config.scheme
        sums = sum_of_experts(
            MOE_EXPERTS if scheme.name == "none" else MOE_EXPERTS_8_BITS,
            partial(quantize, scheme),
            dispatched.x,
            experts.local_ids(dispatched.ids),
            dispatched.weights,
            w.w13,
            w.w2,
            w.b13,
            w.b2,
            w.w13_scale,
            w.w2_scale,
            dispatched.x_scale,
            out_dtype=output.dtype,
            square=scheme.block,
            **experts.config.gate,
        )
        output.copy_(sums)
