"""The indexers of transformers' classes of sparse attention (DeepSeek-V3.2) through ops.index_topk.

An indexer is entered at its forward: its projections stay, and its keys get a state handle. A class
is recognized by what it chooses: a small one of it is compared with the op on random numbers.
"""

import copy
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.models.rotary import apply_partial_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Of the classes of transformers, as in checkpoints.
PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
# Sizes of the compared one. So many heads that no score is 0, where all keys would be equal.
SMALL = {
    "hidden_size": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "index_topk": 3,
}
TOKENS = 12
Tables = tuple[Tensor, Tensor]
Projection = Callable[[Tensor], Tensor]


class Indexer(Protocol):
    """An indexer of transformers."""

    config: "PretrainedConfig"
    head_dim: int
    index_topk: int
    wq_b: Projection
    wk: Projection
    k_norm: Projection
    weights_proj: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: Tables,
        *rest: object,
        **named: object,
    ) -> Tensor: ...


def is_indexer(module: nn.Module) -> bool:
    return all(hasattr(module, part) for part in (*PARTS, "index_topk"))


def enter_indexers(hf_model: "PreTrainedModel") -> bool:
    """Have its indexers call ops.index_topk while its attention implementation is "atom", in place.
    Returns whether it has any.

    Raises ValueError for an indexer that chooses other keys than the op.
    """
    indexers = [module for module in hf_model.modules() if is_indexer(module)]
    for cls in {type(module) for module in indexers}:
        if reason := _why_unlike(cls, hf_model.config.get_text_config()):
            raise ValueError(f"{type(hf_model).__name__}: {cls.__name__} {reason}")
    for module in indexers:
        module.keys = ops.indexer_state(int(module.head_dim))
        module.keys = module.keys.to(hf_model.device, hf_model.dtype)
        module.__dict__["forward"] = MethodType(_forward, module)
    return bool(indexers)


def _forward(
    indexer: Indexer,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: Tables,
    *rest: object,
    **named: object,
) -> Tensor:
    inputs = (hidden_states, q_resid, position_embeddings)
    if indexer.config._attn_implementation != "atom":
        of_class: Callable[..., Tensor] = type(indexer).forward
        return of_class(indexer, *inputs, *rest, **named)
    return choose(indexer, *inputs, getattr(indexer, "keys", None))


def choose(
    indexer: Indexer, x: Tensor, q_latent: Tensor, tables: Tables, keys: Tensor | None
) -> Tensor:
    """x [B, T, D] and the latent of its queries -> positions [B, T, K] i32. keys: the handle."""
    cos, sin = (table.unsqueeze(-2) for table in tables)
    q = torch.unflatten(indexer.wq_b(q_latent), -1, (-1, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(x)).unsqueeze(-2)
    q, k = apply_partial_rope(q, k, cos, sin)
    if isinstance(indexer.weights_proj, nn.Linear):  # which is in fp32 in a model in fp16
        x = x.to(indexer.weights_proj.weight.dtype)
    weights = indexer.weights_proj(x)
    return ops.index_topk(q, k.squeeze(-2), weights, keys, topk=indexer.index_topk)


def _why_unlike(cls: type[Any], config: "PretrainedConfig") -> str:
    """Why an indexer is not the op; "" if it is."""
    small = copy.deepcopy(config)
    for name, value in SMALL.items():
        setattr(small, name, value)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.device("cpu"), torch.no_grad():
        indexer = cls(small, 0).float()
        for parameter in indexer.parameters():
            parameter.copy_(drawn(*parameter.shape))
        angles = drawn(1, TOKENS, SMALL["qk_rope_head_dim"] // 2).repeat(1, 1, 2)
        tables = (angles.cos(), angles.sin())
        x, latent = drawn(1, TOKENS, SMALL["hidden_size"]), drawn(1, TOKENS, SMALL["q_lora_rank"])
        hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
        mask = torch.zeros(1, TOKENS, TOKENS).masked_fill(hidden, float("-inf"))
        try:
            expected = cls.forward(indexer, x, latent, tables, mask, torch.arange(TOKENS)[None])
            ours = choose(indexer, x, latent, tables, None)
        except Exception as error:  # code of others
            return f"cannot be compared with ops.index_topk: {type(error).__name__}: {error}"
    last = slice(SMALL["index_topk"], None)  # rows before it choose all keys
    same = torch.equal(expected[0, last].sort(-1).values.int(), ours[0, last])
    return "" if same else "chooses other keys than ops.index_topk"
