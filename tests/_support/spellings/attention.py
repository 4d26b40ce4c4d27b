"""Attention, written out."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling

B, N, K, T, D, LONG = 2, 6, 3, 7, 10, 53


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def heads(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, N, T, D]."""
    return rand(B, N, T, D).to(dtype), rand(B, N, T, D).to(dtype), rand(B, N, T, D).to(dtype)


def grouped(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v of K heads, and a float mask of padding and later tokens."""
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) | (torch.arange(T) > 4)[None]
    both = torch.stack((torch.ones(T, T, dtype=torch.bool).triu(1), hidden))[:, None]
    mask = torch.zeros(B, 1, T, T).masked_fill(both, torch.finfo(dtype).min).to(dtype)
    q, k, v = rand(B, N, T, D), rand(B, K, T, D), rand(B, K, T, D)
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


def with_sinks(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *grouped(dtype), rand(N).to(dtype)


def with_alibi(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Heads, the mask, and ALiBi's positions [B * N, 1, LONG]: a CPU leaves fewer as written."""
    q, k, v = (rand(B, N, LONG, D).to(dtype) for _ in range(3))
    slopes = torch.tensor([2.0 ** -(n + 1) for n in range(N)])
    alibi = (slopes[:, None, None] * torch.arange(LONG)).repeat(B, 1, 1).to(dtype)
    later = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
    mask = torch.zeros(B, 1, LONG, LONG).masked_fill(later, torch.finfo(dtype).min)
    return q, k, v, mask.to(dtype), alibi


def repeat_kv(x: Tensor) -> Tensor:
    spread = x[:, :, None].expand(x.shape[0], K, N // K, T, D)
    return spread.reshape(x.shape[0], N, T, D)


def llama(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.1, training=False), repeat_kv(v)).transpose(1, 2)


def gemma(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.tanh(torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3 / 5.0) * 5.0 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(2, 3)) * 0.3 + mask
    both = torch.cat((scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)), -1)
    both = both - both.max(dim=-1, keepdim=True).values
    weights = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
    return torch.matmul(weights, repeat_kv(v)).transpose(1, 2).contiguous()


def gpt_j(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(D)
    scores = scores + torch.zeros(T, T).masked_fill(hidden, torch.finfo(torch.float32).min)
    return scores.softmax(-1).to(v.dtype) @ v


def codegen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q.float() @ repeat_kv(k).float().transpose(-1, -2) + mask) / math.sqrt(D)
    return scores.softmax(-1).to(v.dtype) @ repeat_kv(v)


def gpt_neo(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q.float() @ repeat_kv(k).float().transpose(-1, -2)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    scores = torch.where(seen, scores, torch.finfo(torch.float32).min) + mask
    return scores.softmax(-1).to(v.dtype) @ repeat_kv(v)


def bloom(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, alibi: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * N, LONG, D) for x in (q, k, v))
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.3)
    scores = scores.view(B, N, LONG, LONG) + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(B * N, LONG, LONG), v).view(B, N, LONG, D).permute(0, 2, 1, 3)


def mpt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, alibi: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3 + alibi[:N]
    scores = scores.masked_fill(mask.to(torch.bool), torch.finfo(q.dtype).min)
    return torch.matmul(F.softmax(scores.float(), -1).to(v.dtype), v)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * N, T, D) for x in (q, k, v))
    return torch.bmm(torch.bmm(q * 0.3, k.transpose(1, 2)).softmax(-1), v)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(T)[:, None], torch.arange(T)[None]
    seen = (columns <= rows) & (columns > rows - 3)
    return (q @ k.mT * 0.3).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.3).softmax(-1)
    return weights @ v, weights


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.3).softmax(-1), 1e-9, training=True) @ v


def with_bias_in_softcap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (torch.tanh(q @ repeat_kv(k).mT + mask) * 5.0).softmax(-1) @ repeat_kv(v)


def weak_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return (q @ k.mT * 0.3).masked_fill(hidden, -5.0).softmax(-1) @ v


SPELLINGS = (
    tuple(
        # In 16 bits they stay as written on a CPU.
        Spelling(text, models, "attention", function, with_alibi, dtypes=(torch.float32,))
        for text, models, function in (
            ("bmm(softmax(baddbmm(alibi, q, k.T) + mask), v)", "Bloom", bloom),
            ("softmax((q @ k.T * scale + alibi).masked_fill(mask, min)) @ v", "MPT", mpt),
        )
    )
    + tuple(
        Spelling(text, models, "attention", function, inputs)
        for text, models, function, inputs in (
            ("softmax(q @ k.T * scale + mask) @ v", "Llama, Qwen3, most (eager)", llama, grouped),
            ("softmax(tanh(q @ k.T * scale / cap) * cap + mask) @ v", "Gemma-2", gemma, grouped),
            (
                "softmax(cat(q @ k.T * scale + mask, sinks))[..., :-1] @ v",
                "GPT-OSS",
                gpt_oss,
                with_sinks,
            ),
            (
                "softmax(q.float() @ k.float().T / scale + mask).to(v.dtype) @ v",
                "GPT-J",
                gpt_j,
                heads,
            ),
            ("softmax((q @ k.T + mask) / scale) @ v", "CodeGen", codegen, grouped),
            ("softmax(where(seen, q @ k.T, min) + mask) @ v", "GPT-Neo", gpt_neo, grouped),
            (
                "einsum(softmax(einsum(q, k).masked_fill(mask, -inf)), v)",
                "own models",
                einsum,
                heads,
            ),
            ("bmm(softmax(bmm(q * scale, k.T)), v)", "BART, fairseq", bmm, heads),
            ("softmax((q @ k.T).masked_fill(~window, -inf)) @ v", "own models", windowed, heads),
        )
    )
    + tuple(
        Spelling(text, models, "attention", function, inputs, 0, reason, told)
        for text, models, function, inputs, reason, told in (
            (
                "weights = softmax(q @ k.T); return weights @ v, weights",
                "output_attentions=True",
                with_weights,
                heads,
                "the graph returns it",
                "the weights are returned",
            ),
            (
                "dropout(softmax(q @ k.T), training=True) @ v",
                "training",
                with_dropout,
                heads,
                "expected weights times values; found native_dropout",
                "dropout is on",
            ),
            (
                "softmax(tanh(q @ k.T + bias) * cap) @ v",
                "own models",
                with_bias_in_softcap,
                grouped,
                "masks after the softcap",
                "the op adds masks after the softcap",
            ),
            (
                "softmax((q @ k.T).masked_fill(mask, -5)) @ v",
                "own models",
                weak_fill,
                heads,
                "a mask that fills with",
                "-5 hides no key",
            ),
        )
    )
)
