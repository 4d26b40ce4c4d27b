"""Routers and experts of mixtures."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling

# T tokens, E experts in G groups, K of each token, D width of the model, I width of an expert.
T, E, G, K, D, I = 7, 12, 3, 2, 10, 14  # noqa: E741
Routed = tuple[Tensor, Tensor]


def logits(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(T, E).to(dtype),)


def logits_and_bias(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return *logits(dtype), torch.randn(E)


def experts(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, ids, weights, w13 and w2."""
    ids = torch.rand(T, E).topk(K).indices
    x, weights, w13, w2 = (
        torch.randn(*shape).to(dtype) for shape in ((T, D), (T, K), (E, 2 * I, D), (E, D, I))
    )
    return x, ids, weights, w13, w2


def softmax_first(logits: Tensor) -> Routed:
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(K, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


def softmax_last(logits: Tensor) -> Routed:
    chosen, ids = logits.topk(K, -1)
    return chosen.softmax(-1), ids


def biased(logits: Tensor, bias: Tensor) -> Routed:
    scores = logits.float().sigmoid()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def grouped(logits: Tensor, bias: Tensor, outside: float = float("-inf")) -> Routed:
    scores = logits.float().sigmoid()
    choice = scores + bias
    of_groups = choice.view(-1, G, E // G).topk(2, -1).values.sum(-1)
    chosen = of_groups.topk(2, -1, sorted=False).indices
    mask = torch.zeros_like(of_groups).scatter(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, G, E // G).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), outside).topk(K, -1).indices
    return scores.gather(1, ids), ids


def added(logits: Tensor, bias: Tensor) -> Routed:
    weights, ids = (logits.float().sigmoid() + bias).topk(K, -1)
    return weights, ids


def gathered(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = torch.einsum("tkih,th->tki", w13[ids], x).chunk(2, -1)
    y = torch.einsum("tkhi,tki->tkh", w2[ids], F.silu(gate) * up)
    return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(x.dtype)


SPELLINGS = (
    Spelling(
        "p, ids = softmax(logits).topk(k); p / p.sum()",
        "Qwen3-MoE, Mixtral, OLMoE",
        "topk_route",
        softmax_first,
        logits,
    ),
    Spelling(
        "p, ids = logits.topk(k); softmax(p)",
        "GPT-OSS, Granite",
        "topk_route",
        softmax_last,
        logits,
    ),
    Spelling(
        "ids = (s + bias).topk(k); p = s.gather(ids); p / (p.sum() + eps) * scale, s = sigmoid()",
        "MiniMax-M2, ERNIE 4.5 with a softmax",
        "topk_route",
        biased,
        logits_and_bias,
    ),
    Spelling(
        "ids = (s + bias).masked_fill(other groups, -inf).topk(k); s.gather(ids)",
        "GLM-4.5, DeepSeek-V3",
        "topk_route",
        grouped,
        logits_and_bias,
    ),
    Spelling(
        "ids = (s + bias).masked_fill(other groups, 0).topk(k); s.gather(ids)",
        "DeepSeek-V3's first code",
        "topk_route",
        lambda logits, bias: grouped(logits, bias, 0.0),
        logits_and_bias,
        reason="masked_fill with value=-inf; found value=0.0",
        table="a negative biased score is less than the 0 of other groups",
    ),
    Spelling(
        "p, ids = (s + bias).topk(k)",
        "research code",
        "topk_route",
        added,
        logits_and_bias,
        reason="gather",
        table="the bias is in the weights",
    ),
    Spelling(
        'einsum("tkih,th->tki", w13[ids], x), gate, einsum("tkhi,tki->tkh", w2[ids], h)',
        "the files of `models/`",
        "moe_experts",
        gathered,
        experts,
    ),
)
