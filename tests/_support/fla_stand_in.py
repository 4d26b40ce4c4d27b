"""The two functions of flash-linear-attention (fla) that atomc calls, in plain PyTorch.

Written from the documentation and the source of fla 0.6.0, without code of atomc: arguments, their
defaults, keywords that are ignored, what is rounded, and the dtype of the result.

B batch, T tokens, H key heads, N value heads, K key width, V value width.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

CALLS: list[str] = []  # names of the functions, as they are called


def _walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The result [B, T, N, V] and the last state [B, N, K, V] in fp32, token by token."""
    group = v.shape[2] // q.shape[2]
    key_head = torch.arange(v.shape[2]) // group
    out = torch.full(v.shape, float("nan"))
    for t in range(v.shape[1]):
        query, key = q[:, t, key_head].float() * scale, k[:, t, key_head].float()
        state = state * g[:, t].float().exp()[:, :, None, None]
        stored = torch.einsum("bnk,bnkv->bnv", key, state)
        change = beta[:, t].float()[:, :, None] * (v[:, t].float() - stored)
        state = state + torch.einsum("bnk,bnv->bnkv", key, change)
        out[:, t] = torch.einsum("bnk,bnkv->bnv", query, state)
    return out, state


def _normalized(x: Tensor) -> Tensor:
    return x.float() / torch.sqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """The first state. fla's kernels read memory by these sizes, and check few of them."""
    (batch, tokens, heads, keys), (value_heads, values) = q.shape, v.shape[2:]
    assert cu_seqlens is None, "ragged sequences are not written here"
    assert k.shape == (batch, tokens, heads, keys) and v.shape[:2] == (batch, tokens)
    assert g.shape == beta.shape == (batch, tokens, value_heads) and value_heads % heads == 0
    shape = (batch, value_heads, keys, values)
    state = torch.zeros(shape) if initial_state is None else initial_state.float()
    assert state.shape == shape
    return state


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    CALLS.append("recurrent")
    assert gk is None and gv is None and not state_v_first
    g = torch.zeros(v.shape[:3]) if g is None else g
    beta = torch.ones(v.shape[:3]) if beta is None else beta
    state = _checked(q, k, v, g, beta, initial_state, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    out, state = _walk(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale, state)
    return out.to(v.dtype), state if output_final_state else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Normalized queries and keys are rounded to their dtype; the result has that of q."""
    CALLS.append("chunk")
    assert not state_v_first
    assert q.shape[-1] <= 256, "current kernel does not support head dimension larger than 256."
    state = _checked(q, k, v, g, beta, initial_state, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q).to(q.dtype), _normalized(k).to(k.dtype)
    out, state = _walk(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale, state)
    return out.to(q.dtype), state if output_final_state else None


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.6.0", **functions: Any) -> None:
    """Make a package `fla` of these functions; functions: others in their place."""
    found = {
        function.__name__: function
        for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
    } | functions
    modules: dict[str, Any] = {
        "fla": {"__version__": version, "__path__": []},
        "fla.ops": {"__path__": []},
        "fla.ops.gated_delta_rule": found,
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    CALLS.clear()
