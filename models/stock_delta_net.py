"""The gated delta nets of transformers' classes (Qwen3-Next, Qwen3.5, OLMo Hybrid) through
ops.causal_conv1d and ops.gated_delta_rule.

The loop over chunks that such a class has depends on the number of tokens, so a layer is entered at
its forward: its parts stay, and it gets state handles. A class is recognized by what it computes: a
small one of it is compared with the ops on random numbers.
"""

import copy
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.models.gated_delta_net import Projected, recur
from atomc.models.qwen3_next import unpacked

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_TYPE = "linear_attention"  # of such layers in config.layer_types
RECURRENCE = frozenset({"conv1d.weight", "A_log", "dt_bias"})
# Sizes of the compared one, and more tokens than a chunk of 64 has.
SMALL = {
    "hidden_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
TOKENS = 70
# Of the largest number in fp32. The inverse of a chunk's triangle and the loop over tokens round
# differently: 2e-6 in all classes of transformers 5.
TOLERANCE = 1e-4
# Arguments of forward for several sequences in one row.
PACKED = ("cu_seq_lens_q", "seq_idx")


def _packed(layer: Any, x: Tensor) -> Projected:
    """Qwen3-Next."""
    return unpacked(layer, layer.in_proj_qkvz(x), layer.in_proj_ba(x))


def _split(layer: Any, x: Tensor) -> Projected:
    """Qwen3.5."""
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    return Projected(layer.in_proj_qkv(x), z, layer.in_proj_b(x).sigmoid(), layer.in_proj_a(x))


def _separate(layer: Any, x: Tensor) -> Projected:
    """OLMo Hybrid, whose state may have negative eigenvalues."""
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    z = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    beta = layer.b_proj(x).sigmoid()
    if layer.allow_neg_eigval:
        beta = beta * 2.0
    return Projected(qkv, z, beta, layer.a_proj(x))


# Names of the projections, of the norm and of the last projection.
SPELLINGS: dict[tuple[str, ...], Callable[[Any, Tensor], Projected]] = {
    ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"): _packed,
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"): _split,
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj"): _separate,
}


def _spelling(module: nn.Module) -> tuple[str, ...] | None:
    """The names of its parts in SPELLINGS; None for a module that is no gated delta net."""
    children = module._modules
    if "conv1d" not in children or not {"A_log", "dt_bias"} <= module._parameters.keys():
        return None
    return next((names for names in SPELLINGS if all(name in children for name in names)), None)


def enter_delta_nets(hf_model: "PreTrainedModel") -> int:
    """Have its gated delta nets call ops while its attention implementation is "atom", in place.
    Returns how many it has.

    Raises ValueError for one that computes something else than the ops.
    """
    found = _delta_nets(hf_model)
    if reasons := _refusals(hf_model, found):
        raise ValueError(min(reasons.values()))
    for module in found:
        channels, _, taps = module.conv1d.weight.shape
        heads, where = len(module.A_log), (hf_model.device, hf_model.dtype)
        module.conv_state = ops.conv_state(channels, taps).to(*where)
        module.delta_state = ops.delta_state(heads, module.head_k_dim, module.head_v_dim).to(*where)
        _enter(module, hf_model.config.get_text_config())
    return len(found)


def enter_while_compiled(model: nn.Module) -> list[str]:
    """Have its gated delta nets call ops while torch.compile traces them, in place. Returns why
    some of them do not.
    """
    found = [module for module in _delta_nets(model) if "forward" not in vars(module)]
    if not found or not hasattr(model, "config"):
        return []
    reasons = _refusals(model, found)
    for module in found:
        if type(module) not in reasons:
            _enter(module, None)
    return sorted(reasons.values())


def leave(model: nn.Module) -> None:
    """Undo enter_while_compiled."""
    for module in _delta_nets(model):
        if vars(module).get("entered_while", module) is None:
            del module.__dict__["forward"], module.__dict__["entered_while"]


def _delta_nets(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _spelling(module)]


def _refusals(model: Any, found: Iterable[nn.Module]) -> dict[type, str]:
    """Why the layers of a class are not the ops."""
    config, name = model.config.get_text_config(), type(model).__name__
    return {
        cls: f"{name}: {cls.__name__} {reason}"
        for cls in {type(module) for module in found}
        if (reason := _why_unlike(cls, config))
    }


def _enter(module: nn.Module, config: "PretrainedConfig | None") -> None:
    """config: of the attention implementation while which it calls ops; None: while it is
    compiled.
    """
    module.__dict__["entered_while"] = config
    module.__dict__["forward"] = MethodType(_forward, module)


def _calls_ops(layer: Any) -> bool:
    if layer.entered_while is None:
        return torch.compiler.is_compiling()
    return bool(layer.entered_while._attn_implementation == "atom")


def _forward(
    layer: Any,
    hidden_states: Tensor,
    cache_params: object | None = None,
    attention_mask: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """That of the class, with its arguments. It runs itself where the layer does not call ops, with
    a cache of transformers, and for packed sequences.
    """
    packed = any(named.get(name) is not None for name in PACKED)
    if not _calls_ops(layer) or cache_params is not None or packed:
        own: Callable[..., Tensor] = type(layer).forward
        return own(
            layer,
            hidden_states,
            cache_params=cache_params,
            attention_mask=attention_mask,
            **named,
        )
    if attention_mask is not None:  # [B, T], 0 for padding
        hidden_states = (hidden_states * attention_mask[..., None]).to(hidden_states.dtype)
    states = (getattr(layer, name, None) for name in ("conv_state", "delta_state"))
    return mix(layer, hidden_states, *states)


def mix(
    layer: Any, x: Tensor, conv_state: Tensor | None = None, delta_state: Tensor | None = None
) -> Tensor:
    """What the layer makes of x [B, T, D] -> [B, T, D]."""
    spelling = _spelling(layer)
    assert spelling is not None
    projected = SPELLINGS[spelling](layer, x)
    out = recur(layer, projected, conv_state, delta_state)
    *_, norm, out_proj = (getattr(layer, name) for name in spelling)
    # As rows: with transformers' kernels the norm may be one that needs them.
    rows = norm(out.flatten(0, -2), projected.z.flatten(0, -2))
    mixed: Tensor = out_proj(rows.view(out.shape).flatten(-2))
    return mixed


def _why_unlike(cls: type[Any], config: "PretrainedConfig") -> str:
    """Why a class is not what the ops compute; "" if it is."""
    small = copy.deepcopy(config)
    for name, value in SMALL.items():
        setattr(small, name, value)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    try:
        with torch.device("cpu"), torch.no_grad():
            layer = cls(small, small.layer_types.index(LAYER_TYPE)).float().eval()
            spelling = _spelling(layer)
            assert spelling is not None
            known = RECURRENCE | {f"{name}.weight" for name in spelling} | {"conv1d.bias"}
            parameters = dict(layer.named_parameters())
            if others := sorted(parameters.keys() - known):
                return f"has {', '.join(others)}, which ops.gated_delta_rule has no operand for"
            for parameter in parameters.values():
                parameter.copy_(drawn(*parameter.shape))
            x = drawn(1, TOKENS, SMALL["hidden_size"])
            own, ours = cls.forward(layer, x), mix(layer, x)
    except Exception as error:  # code of others
        return f"cannot be compared with ops.gated_delta_rule: {type(error).__name__}: {error}"
    if own.shape != ours.shape:
        return (
            f"returns {list(own.shape)}, and the layer by ops.gated_delta_rule {list(ours.shape)}"
        )
    activation = getattr(layer, "activation", "silu")
    if activation not in ("silu", "swish"):
        return f"has the activation {activation!r} behind its convolution, supported is 'silu'"
    apart = float((own - ours).abs().max() / own.abs().max())
    if not apart <= TOLERANCE:
        return (
            "computes something else than ops.causal_conv1d and ops.gated_delta_rule: results "
            f"differ by {apart:.1e} of the largest"
        )
    return ""
