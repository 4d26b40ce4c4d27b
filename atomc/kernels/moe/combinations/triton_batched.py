"""Experts of the batched format with the Triton kernel of batched_triton.py."""

import torch
from torch import Tensor

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import BatchedExperts, Sizes, Spaces, WorkspaceShapes
from atomc.kernels.moe.layer import ExpertsConfig, RankExperts
from atomc.kernels.moe.triton_standard import no_triton, unfit_block


class TritonBatched(BatchedExperts):
    """Two launches, of which the first gates its results, and a quantizer in between. Nothing waits
    for the host.
    """

    name = "triton_batched"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        return no_triton(device)

    def refuse_config(self, config: ExpertsConfig) -> str | None:
        return unfit_block(self.name, config, 64)

    def workspace_shapes(self, sizes: Sizes) -> WorkspaceShapes:
        rows = (sizes.experts, sizes.rows)
        return WorkspaceShapes((*rows, sizes.inner), (0,), (*rows, sizes.hidden))

    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        # Triton is optional.
        from atomc.kernels.moe.combinations.batched_triton import batched_product
        from atomc.kernels.moe.triton_quantizers import quantize
        from atomc.kernels.triton.rows.gate import GateConstants

        assert dispatched.expert_num_tokens is not None
        w, scheme = experts.weights, experts.config.scheme
        num_tokens, act = dispatched.expert_num_tokens, spaces[0]
        batched_product(
            dispatched.x,
            dispatched.x_scale,
            w.w13,
            w.w13_scale,
            w.b13,
            num_tokens,
            act,
            block=scheme.block,
            gate=GateConstants(**experts.config.gate),
        )
        codes, scale = quantize(scheme, act)
        batched_product(
            codes, scale, w.w2, w.w2_scale, w.b2, num_tokens, output, block=scheme.block
        )
