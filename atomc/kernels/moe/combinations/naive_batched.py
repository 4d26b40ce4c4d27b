"""Experts of the batched format, one after another: the reference of the format."""

import torch
from torch import Tensor

from atomc.kernels.moe.combinations.reference import experts_reference
from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import BatchedExperts, Spaces
from atomc.kernels.moe.layer import RankExperts


class NaiveBatched(BatchedExperts):
    """The reference of the standard format, where each row has one expert, with the weight 1."""

    name = "naive_batched"

    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        x, scale, num_tokens = dispatched.x, dispatched.x_scale, dispatched.expert_num_tokens
        assert num_tokens is not None
        expert = torch.arange(len(x), device=x.device).unsqueeze(1)
        used = torch.arange(x.shape[1], device=x.device) < num_tokens.unsqueeze(1)
        ids = torch.where(used, expert, -1).view(-1, 1)
        results = experts_reference(
            x.flatten(0, 1),
            None if scale is None else scale.flatten(0, 1),
            ids,
            torch.ones_like(ids, dtype=torch.float32),
            experts.weights,
            experts.config,
            output.dtype,
        )
        output.copy_(results.view_as(output))
