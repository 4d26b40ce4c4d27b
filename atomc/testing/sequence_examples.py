"""Small example arguments for each op whose rows are tokens of sequences: positions, attention,
caches and states. Sizes are those of random_inputs.
"""

from functools import partial

import torch
from torch import Tensor

from atomc import ops
from atomc.testing.random_inputs import (
    CHOSEN,
    CONTEXT,
    EPS,
    Arguments,
    D,
    Examples,
    H,
    K,
    L,
    N,
    P,
    R,
    RandomInputs,
)


def _qk(n: RandomInputs) -> Arguments:
    q, k, _ = n.heads(N, K, K)
    return {"q": q, "k": k, **n.angles(), "q_weight": n(H), "k_weight": n(H), "eps": EPS}


def _attended(n: RandomInputs) -> Arguments:
    return {**dict(zip("qkv", n.heads(N, K, K), strict=True)), "scale": H**-0.5}


def _written(n: RandomInputs) -> Arguments:
    return {**dict(zip("kv", n.heads(K, K), strict=True)), **n.caches(), "slots": n.slots()}


def _rope_written(n: RandomInputs) -> Arguments:
    heads = dict(zip("qkv", n.heads(N, K, K), strict=True))
    return {**heads, **n.angles(), **n.caches(), "slots": n.slots()}


def _norm_rope_written(n: RandomInputs) -> Arguments:
    return _rope_written(n) | {"q_weight": n(H), "k_weight": n(H), "eps": EPS}


def _int32(n: RandomInputs, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=n.device)


def _last_tokens(n: RandomInputs) -> Arguments:
    """Of a step of the last T tokens of a sequence of CONTEXT."""
    return {"query_start": _int32(n, 0, n.T), "seq_lens": _int32(n, CONTEXT)}


def _read_from(n: RandomInputs, cache: Tensor) -> Arguments:
    """The last T tokens of a sequence of CONTEXT that has all blocks of the cache."""
    blocks = _int32(n, *range(len(cache)))[None]
    return {**_last_tokens(n), "block_tables": blocks, "token": n(0)}


def _pages(n: RandomInputs, width: int) -> Tensor:
    """A cache of rows of this width for a sequence of CONTEXT."""
    return n(-(-CONTEXT // 16), 16, width)


def _paged(n: RandomInputs) -> Arguments:
    caches = n.caches()
    steps = _read_from(n, caches["k_cache"])
    return {"q": n(n.T, N, H), **caches, **steps, "scale": H**-0.5}


def _latent_attended(n: RandomInputs) -> Arguments:
    return {
        "q_nope": n(n.T, N, P),
        "q_rope": n(n.T, N, R),
        "latent": n(n.T, L),
        "k_rope": n(n.T, 1, R),
        "weight": n(N * (P + P), L) / L**0.5,
        "scale": (P + R) ** -0.5,
    }


def _packed(n: RandomInputs) -> Arguments:
    """Two sequences, the first of one row."""
    starts = _int32(n, 0, min(n.T, 1), n.T)
    heads = {name: n(n.T, N, H) for name in "qkv"}
    return {**heads, "query_start": starts, "scale": H**-0.5}


def _latent_paged(n: RandomInputs) -> Arguments:
    cache = _pages(n, L + R)
    return {
        "q": n(n.T, N, L + R),
        "kv_cache": cache,
        **_read_from(n, cache),
        "latent": L,
        "scale": (P + R) ** -0.5,
    }


def _latent_projected(n: RandomInputs) -> Arguments:
    arguments = _latent_paged(n) | {"q": n(n.T, N, P + R), "weight": n(N * (P + P), L) / L**0.5}
    del arguments["latent"]
    return arguments


def _indexed(n: RandomInputs) -> Arguments:
    return {"q": n(n.T, N, P), "k": n(n.T, P), "weights": n(n.T, N), "topk": CHOSEN}


def _indexed_in_cache(n: RandomInputs) -> Arguments:
    """The last T tokens of a sequence of CONTEXT."""
    arguments = _latent_paged(n) | _indexed(n) | {"index_cache": _pages(n, P)}
    for name in ("k", "kv_cache", "latent", "scale"):
        del arguments[name]
    return arguments


def _latent_of_chosen(n: RandomInputs) -> Arguments:
    positions = torch.arange(CHOSEN, dtype=torch.int32, device=n.device)
    return _latent_paged(n) | {"chosen": positions.expand(n.T, -1).contiguous()}


def _latent(n: RandomInputs) -> Arguments:
    cache = _pages(n, L + R)
    return {"kv_c": n(n.T, L), "k_pe": n(n.T, 1, R), "kv_cache": cache, "slots": n.slots()}


def _latent_queries(n: RandomInputs) -> Arguments:
    return _latent(n) | n.angles(R) | {"q_nope": n(n.T, N, L), "q_pe": n(n.T, N, R)}


def _head_linear_inputs(scheme: str, n: RandomInputs) -> Arguments:
    if scheme == "mxfp4":
        (x, x_scale), (weight, scale) = (
            n.quantized(ops.quant_mxfp4, *shape) for shape in ((n.T, N, P), (N, L, P))
        )
    else:
        (x, x_scale), weight = (
            n.quantized(ops.quant_fp8_group, n.T, N, P),
            n(N, L, P).to(torch.float8_e4m3fn),
        )
        scale = torch.full((1,), 0.02, device=n.device)
    return {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": scale,
        "out_dtype": n.dtype,
    }


def _latent_multiplied(n: RandomInputs) -> Arguments:
    codes, scale = n.quantized(ops.quant_mxfp4, N * (P + P), L)
    return _latent_projected(n) | {"weight": codes, "weight_scale": scale, "scheme": "mxfp4"}


def _stored(scheme: str, n: RandomInputs) -> Arguments:
    """kv_b_proj of N heads, P columns of each for keys and P for values."""
    quantizer = ops.quant_mxfp4 if scheme == "mxfp4" else ops.quant_fp8_per_token
    codes, scale = n.quantized(quantizer, N * 2 * P, L)
    return {"weight": codes, "weight_scale": scale, "scheme": scheme}


def _stored_weight(scheme: str, n: RandomInputs) -> Arguments:
    return _stored(scheme, n) | {"dtype": n.dtype}


def _stored_half(scheme: str, n: RandomInputs) -> Arguments:
    shape: Arguments = {"group": 128, "heads": N, "nope": P, "part": "keys"}
    return _stored(scheme, n) | shape | {"product": scheme, "codes": torch.float8_e4m3fn}


def _half_multiplied(scheme: str, n: RandomInputs) -> Arguments:
    weights = _head_linear_inputs(scheme, n)
    parameters = {name: weights[name] for name in ("weight", "weight_scale")}
    return {"x": n(n.T, N, P), **parameters, "scheme": scheme}


def _head_write_inputs(scheme: str, n: RandomInputs) -> Arguments:
    arguments = _half_multiplied(scheme, n)
    q_nope = arguments.pop("x")
    return _latent(n) | n.angles(R) | arguments | {"q_nope": q_nope, "q_pe": n(n.T, N, R)}


def _convolved(n: RandomInputs) -> Arguments:
    return {"x": n(n.T, D), "weight": n(D, 4), "bias": n(D), "activation": "silu"}


def _ruled(n: RandomInputs) -> Arguments:
    """K key heads and N value heads."""
    q, k, v = n.heads(K, K, N)
    decay, beta = -n(n.T, N, dtype=torch.float32).abs(), n(n.T, N).sigmoid()
    return {"q": q, "k": k, "v": v, "g": decay, "beta": beta, "scale": H**-0.5}


def _slot_inputs(given: Arguments, name: str, state: Tensor, n: RandomInputs) -> Arguments:
    """The last T tokens of a sequence of CONTEXT, whose state is in the second of these slots."""
    slot = torch.tensor([1], device=n.device)
    return given | {name: state, **_last_tokens(n), "state_slots": slot}


def _convolved_in_steps(n: RandomInputs) -> Arguments:
    return _slot_inputs(_convolved(n), "conv_state", n(3, 3, D), n)


def _ruled_in_steps(n: RandomInputs) -> Arguments:
    return _slot_inputs(_ruled(n), "recurrent_state", n(3, N, H, H, dtype=torch.float32), n)


def _delta_gates(n: RandomInputs) -> Arguments:
    return {"a": n(n.T, N), "b": n(n.T, N), "A_log": n(N), "dt_bias": n(N)}


def _convolved_and_ruled(n: RandomInputs) -> Arguments:
    """Two key heads and N value heads of H columns."""
    channels = (2 * 2 + N) * H
    arguments = {"x": n(n.T, channels), "weight": n(channels, 4), "bias": None, **_delta_gates(n)}
    arguments |= {"conv_state": n(3, 3, channels), "activation": "silu", "scale": H**-0.5}
    return _slot_inputs(arguments, "recurrent_state", n(3, N, H, H, dtype=torch.float32), n)


def _scanned(n: RandomInputs) -> Arguments:
    """N heads of H columns and two groups of P numbers of state for each column."""
    (x,) = n.heads(N)
    small = [n(N, dtype=torch.float32) for _ in range(3)]
    by_name = dict(zip(("a_log", "d", "dt_bias"), small, strict=True))
    groups = {"b": n(n.T, 2, P), "c": n(n.T, 2, P)}
    return {"x": x, "dt": n(n.T, N), **by_name, **groups, "dt_min": 0.0, "dt_max": None}


def _scanned_in_steps(n: RandomInputs) -> Arguments:
    return _slot_inputs(_scanned(n), "recurrent_state", n(3, N, H, P, dtype=torch.float32), n)


SEQUENCE_EXAMPLES: Examples = {
    ops.rope: {"": lambda n: {"x": n(n.T, N, H), **n.angles()}},
    ops.rotary_tables: {
        "": lambda n: {"positions": n.below(CONTEXT, n.T, 1), "inv_freq": n(H // 2)}
    },
    ops.qk_norm_rope: {"": _qk},
    ops.attention: {"": _attended, "window": lambda n: _attended(n) | {"window": 8}},
    ops.kv_write: {"": _written},
    ops.rope_kv_write: {"": _rope_written},
    ops.qk_norm_rope_kv_write: {"": _norm_rope_written},
    ops.paged_attention: {"": _paged, "window": lambda n: _paged(n) | {"window": 8}},
    ops.varlen_attention: {"": _packed},
    ops.mla_attention: {"": _latent_attended},
    ops.mla_absorbed_attention: {"": _latent_paged, "chosen": _latent_of_chosen},
    ops.index_topk: {"": _indexed},
    ops.index_write: {
        "": lambda n: {
            "k": n(n.T, P),
            "index_cache": _pages(n, P),
            "slots": n.slots(),
        }
    },
    ops.paged_index_topk: {"": _indexed_in_cache},
    ops.chosen_mask: {"": lambda n: {"chosen": n.below(n.T, n.T, CHOSEN, dtype=torch.int32)}},
    ops.mla_paged_attention: {"": _latent_projected},
    ops.quantized_mla_paged_attention: {"": _latent_multiplied},
    ops.kv_b_weight: {scheme: partial(_stored_weight, scheme) for scheme in ("fp8", "mxfp4")},
    ops.kv_b_half: {scheme: partial(_stored_half, scheme) for scheme in ("fp8", "mxfp4")},
    ops.linear_by_head: {"": lambda n: {"x": n(n.T, N, P), "weight": n(N, L, P)}},
    ops.quantized_linear_by_head: {
        scheme: partial(_half_multiplied, scheme) for scheme in ("fp8", "mxfp4")
    },
    ops.mla_kv_write: {"": _latent},
    ops.mla_rope_kv_write: {"": _latent_queries},
    ops.scaled_bmm_fp8: {"": partial(_head_linear_inputs, "fp8")},
    ops.bmm_mxfp4: {"": partial(_head_linear_inputs, "mxfp4")},
    ops.causal_conv1d: {"": _convolved},
    ops.causal_conv1d_update: {"": _convolved_in_steps},
    ops.gated_delta_rule: {"": _ruled},
    ops.gated_delta_rule_update: {"": _ruled_in_steps},
    ops.delta_gates: {"": _delta_gates},
    ops.conv_gated_delta_rule_update: {"": _convolved_and_ruled},
    ops.ssm_scan: {"": _scanned},
    ops.ssm_scan_update: {"": _scanned_in_steps},
    ops.bmm_rope_kv_write: {
        scheme: partial(_head_write_inputs, scheme) for scheme in ("fp8", "mxfp4")
    },
}
