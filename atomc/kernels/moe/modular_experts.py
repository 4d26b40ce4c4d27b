"""A mixture of experts composed of a PrepareFinalize and an Experts part."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Sizes
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights, RankExperts
from atomc.kernels.moe.prepare_finalize import PrepareFinalize
from atomc.ops.experts import ACTIVATIONS

IDS = (torch.int32, torch.int64)


def incompatible(
    prepare_finalize: PrepareFinalize | type[PrepareFinalize],
    experts: ExpertsKernel | type[ExpertsKernel],
    scheme: str,
) -> str | None:
    """Why two parts cannot be combined for a quantization scheme, as a sentence; or None."""
    given, (taken, returned) = prepare_finalize.activation_format, experts.activation_formats
    if given != taken:
        return (
            f"{prepare_finalize.name} returns activations in the {given.value} format, and "
            f"{experts.name} takes the {taken.value} format"
        )
    if given != returned:
        return (
            f"{experts.name} returns results in the {returned.value} format, and "
            f"{prepare_finalize.name} combines the {given.value} format"
        )
    for part in (prepare_finalize, experts):
        if scheme not in part.schemes:
            return f"{part.name} supports the schemes {', '.join(part.schemes)}, not {scheme}"
    return None


class ModularExperts:
    """Computes what the op moe_experts computes, or its form for the scheme of `config`, with the
    experts of all ranks.

    chunk_rows  the most rows that the experts process at once, or None: all. Workspaces are as
                large as a chunk needs, and are allocated once per call.

    Raises ValueError if the parts cannot be combined.
    """

    def __init__(
        self,
        prepare_finalize: PrepareFinalize,
        experts: ExpertsKernel,
        config: ExpertsConfig | None = None,
        *,
        chunk_rows: int | None = None,
    ) -> None:
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.config = config or ExpertsConfig()
        self.chunk_rows = chunk_rows
        batched = prepare_finalize.activation_format == ActivationFormat.BATCHED
        # In the batched format prepare has applied the map.
        self.expert_map = None if batched else prepare_finalize.expert_map
        if reason := incompatible(prepare_finalize, experts, self.config.scheme.name):
            raise ValueError(reason)
        if reason := experts.refuse_config(self.config):
            raise ValueError(reason)
        if self.config.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation of experts {self.config.activation!r} is not one of {ACTIVATIONS}"
            )
        if self.expert_map is not None and not experts.supports_expert_map:
            raise ValueError(
                f"{experts.name} has no expert map, and this rank has only "
                f"{prepare_finalize.num_local_experts} of {len(self.expert_map)} experts"
            )
        if chunk_rows is not None and not experts.supports_chunking:
            raise ValueError(
                f"{experts.name} processes all rows at once: chunk_rows={chunk_rows} must be None"
            )
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows={chunk_rows} must be at least 1")

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights as calls take them: made once, and held instead of the others."""
        return self.experts.prepare_weights(weights, self.config)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        of_experts: ExpertWeights,
        *,
        x_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        shared: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """x [T, H], ids and weights [T, k] -> [T, H] in out_dtype.

        of_experts from prepare_weights
        x_scale    scales of an x that is quantized already; out_dtype is required then, and is
                   x.dtype otherwise
        shared     computes what is added to the result, the shared experts: called after this rank
                   has sent its tokens and before it waits for those of others
        Raises ValueError for arguments that the parts do not support.
        """
        self._check(x, ids, of_experts, x_scale, out_dtype)
        dtype = out_dtype or x.dtype
        if self.config.weight_on_input:
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        receive = self.prepare_finalize.prepare_no_receive(
            x, x_scale, ids, weights, of_experts.num_experts, self.config.scheme
        )
        added = None if shared is None else shared()
        dispatched = receive()
        results = self._apply(dispatched, of_experts, dtype)
        out = self.prepare_finalize.finalize(
            dispatched, results, self.experts.finalize_weight_and_reduce()
        )
        return out if added is None else out + added

    def _apply(self, dispatched: Dispatched, weights: ExpertWeights, dtype: torch.dtype) -> Tensor:
        experts, hidden, inner = weights.w2.shape[0], weights.w2.shape[1], weights.w13.shape[1] // 2
        choices, rows = dispatched.ids.shape[1], dispatched.rows
        whole = Sizes(rows, choices, experts, hidden, inner)
        largest = whole._replace(rows=min(rows, self.chunk_rows or rows))

        def empty(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=dispatched.x.device)

        output = empty(self.experts.workspace_shapes(whole).output)
        shapes = self.experts.workspace_shapes(largest)
        space13 = empty((math.prod(shapes.workspace13),))
        space2 = empty((math.prod(shapes.workspace2),))
        for start in range(0, rows, max(largest.rows, 1)):
            stop = min(start + largest.rows, rows)
            complete = stop - start == rows
            shapes = self.experts.workspace_shapes(whole._replace(rows=stop - start))
            self.experts.apply(
                output if complete else output[start:stop],
                (_view(space13, shapes.workspace13), _view(space2, shapes.workspace2)),
                dispatched if complete else dispatched.chunk(start, stop),
                RankExperts(weights, self.expert_map, self.config),
            )
        return output

    def _check(
        self,
        x: Tensor,
        ids: Tensor,
        of_experts: ExpertWeights,
        x_scale: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> None:
        if reason := self.experts.missing(x.device):
            raise ValueError(f"{self.experts.name} cannot run here: {reason}")
        reason = (
            _unprepared(self.prepare_finalize, x, ids, of_experts)
            or _wrong_scales(self.config.scheme.name, of_experts, x_scale, out_dtype)
            or _weighted_otherwise(self.config, ids, x_scale)
        )
        if reason:
            raise ValueError(reason)


def _unprepared(
    prepare: PrepareFinalize, x: Tensor, ids: Tensor, of_experts: ExpertWeights
) -> str | None:
    """Why these tokens cannot be sent to these experts, or None."""
    wanted = prepare.topk_indices_dtype
    if ids.dtype not in ((wanted,) if wanted else IDS):
        expected = wanted or "torch.int32 or torch.int64"
        return f"{prepare.name} takes ids of {expected}, not {ids.dtype}"
    most = prepare.max_tokens_per_rank
    if most is not None and len(x) > most:
        return (
            f"{len(x)} tokens exceed the max_tokens_per_rank={most} of {prepare.name}: raise it, "
            "or split the tokens"
        )
    held = prepare.num_local_experts
    if held is not None and held != of_experts.num_experts:
        return (
            f"the expert map of {prepare.name} gives this rank {held} experts, the weights have "
            f"{of_experts.num_experts}"
        )
    return None


def _wrong_scales(
    scheme: str, of_experts: ExpertWeights, x_scale: Tensor | None, out_dtype: torch.dtype | None
) -> str | None:
    """Why the scales of weights or of x contradict the scheme, or None."""
    scaled = of_experts.w13_scale is not None and of_experts.w2_scale is not None
    if scaled != (scheme != "none"):
        return f"the scheme is {scheme}, and the weights have {'' if scaled else 'no '}scales"
    if x_scale is not None and (out_dtype is None or scheme == "none"):
        return "an x with x_scale is quantized: it needs out_dtype and a scheme other than none"
    return None


def _weighted_otherwise(config: ExpertsConfig, ids: Tensor, x_scale: Tensor | None) -> str | None:
    """Why the inputs cannot be multiplied by the weights, if they should be; or None."""
    if not config.weight_on_input or (ids.shape[1] == 1 and x_scale is None):
        return None
    return (
        "weight_on_input multiplies x by the weight of its only expert before it is quantized; "
        f"here are {ids.shape[1]} experts per token"
        + (" and x_scale" if x_scale is not None else "")
    )


def _view(space: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of a workspace in this shape."""
    return space[: math.prod(shape)].view(shape)
