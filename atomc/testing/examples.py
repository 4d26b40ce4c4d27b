"""Small example arguments for each op, to run a kernel without a model.

T tokens, D width, M width of the MLP and of an expert, N query heads, K key/value heads, H head
width; of latent
attention, L latent width, R rotated width, P width of a key that is not rotated.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.op import Op, OpFunction
from atomc.ops.schemes import SCHEMES
from atomc.ops.state import LAYOUTS, StateSpec

D, M, N, K, H = 256, 512, 4, 2, 128
L, R, P = 512, 64, 128
CONTEXT = 40
EXPERTS, CHOSEN = 8, 2
EPS = 1e-6
Quantizer = OpFunction[..., tuple[Tensor, Tensor]]
Argument = Tensor | float | str | torch.dtype | None
Arguments = dict[str, Argument]


class RandomInputs:
    """Random tensors of one dtype on one device, from a fixed seed; T rows, caches of one
    layout.
    """

    def __init__(self, dtype: torch.dtype, device: str, rows: int, layout: str = "paged"):
        self.dtype, self.device, self.T, self.layout = dtype, device, rows, layout
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype).to(self.device)

    def below(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(dtype).to(self.device)

    def quantized(self, op: Quantizer, *shape: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of random numbers, by one of the quantizers."""
        return op.reference(self(*shape))

    def heads(self, *counts: int) -> tuple[Tensor, ...]:
        """[T, count, H] each, as views of the output of one projection."""
        rows = self(self.T, sum(counts) * H)
        parts = torch.split(rows, [count * H for count in counts], -1)
        return tuple(part.view(self.T, -1, H) for part in parts)

    def angles(self, width: int = H) -> dict[str, Tensor]:
        angle = 3 * torch.randn(self.T, 1, width // 2, generator=self.generator).repeat(1, 1, 2)
        return {
            "cos": angle.cos().to(self.dtype).to(self.device),
            "sin": angle.sin().to(self.dtype).to(self.device),
        }

    def slots(self) -> Tensor:
        """A slot for each row; the last of several is -1, which is not written."""
        slots = torch.randperm(CONTEXT, generator=self.generator)[: self.T]
        slots[self.T - 1] = -1 if self.T > 1 else slots[0]
        return slots.to(self.device)

    def caches(self) -> dict[str, Tensor]:
        """Caches of one sequence, with random keys and values."""
        spec = StateSpec.of("kv", "kv", ((K, H), (K, H)), self.dtype, layout=self.layout)
        size = LAYOUTS[self.layout].block_size or CONTEXT
        made = spec.allocate(-(-CONTEXT // size), size, self.device)
        return {name: cache.copy_(self(*cache.shape)) for name, cache in made.items()}


def _normed(n: RandomInputs, residual: bool = False, **more: int | str) -> Arguments:
    found: Arguments = {"x": n(n.T, D), "weight": n(D), "eps": EPS, **more}
    return found | ({"residual": n(n.T, D)} if residual else {})


def _layer_normed(n: RandomInputs, residual: bool = False) -> Arguments:
    return _normed(n, residual) | {"bias": n(D)}


def _gated(n: RandomInputs, **more: str) -> Arguments:
    gate, up = n(n.T, 2 * M).chunk(2, -1)
    return {"gate": gate, "up": up, **more}


def _quantizing(
    make: Callable[[RandomInputs], Arguments], scheme: str, n: RandomInputs
) -> Arguments:
    scale = torch.tensor([0.02], device=n.device) if scheme == "fp8_static" else None
    return make(n) | {"scheme": scheme, "scale": scale}


def _normed_pair(n: RandomInputs) -> Arguments:
    x, y = torch.split(n(n.T, D + M), [D, M], -1)
    return {"x": x, "y": y, "x_weight": n(D), "y_weight": n(M), "eps": EPS}


def _quantized_pair(scheme: str, n: RandomInputs, **more: bool) -> Arguments:
    scale = torch.tensor([0.02], device=n.device) if scheme == "fp8_static" else None
    return _normed_pair(n) | {"scheme": scheme, "x_scale": scale, "y_scale": scale, **more}


def _linear(n: RandomInputs) -> Arguments:
    return {"x": n(n.T, D), "weight": n(M, D) / 16}


def _of_codes(op: Quantizer, n: RandomInputs) -> Arguments:
    x, x_scale = n.quantized(op, n.T, D)
    weight, weight_scale = n.quantized(op, M, D)
    return {
        "x": x,
        "weight": weight,
        "x_scale": x_scale,
        "weight_scale": weight_scale,
        "out_dtype": n.dtype,
    }


def _blocks(n: RandomInputs) -> Arguments:
    scales = n(M // 128, D // 128, dtype=torch.float32).abs() / 20
    return _of_codes(ops.quant_fp8_group, n) | {"weight_scale": scales}


def _w4a16(n: RandomInputs) -> Arguments:
    codes = n.below(2**31 - 1, M, D // 8, dtype=torch.int32)
    return {"x": n(n.T, D), "weight": codes, "weight_scale": n(M, D // 32).abs() / 50, "group": 32}


def _mxfp4_a16(n: RandomInputs) -> Arguments:
    weight, scale = n.quantized(ops.quant_mxfp4, M, D)
    return {"x": n(n.T, D), "weight": weight, "weight_scale": scale, "out_dtype": n.dtype}


def _routed(n: RandomInputs) -> Arguments:
    weights = n(n.T, CHOSEN, dtype=torch.float32).softmax(-1)
    return {"ids": n.below(EXPERTS, n.T, CHOSEN, dtype=torch.int32), "weights": weights}


def _experts(n: RandomInputs) -> Arguments:
    weights = {"w13": n(EXPERTS, 2 * M, D) / 16, "w2": n(EXPERTS, D, M) / 16}
    return {"x": n(n.T, D), **_routed(n), **weights}


def _experts_of_codes(op: Quantizer, n: RandomInputs) -> Arguments:
    x, x_scale = n.quantized(op, n.T, D)
    w13, w13_scale = n.quantized(op, EXPERTS, 2 * M, D)
    w2, w2_scale = n.quantized(op, EXPERTS, D, M)
    scales: Arguments = {"x_scale": x_scale, "w13_scale": w13_scale, "w2_scale": w2_scale}
    return {"x": x, **_routed(n), "w13": w13, "w2": w2, **scales, "out_dtype": n.dtype}


def _experts_of_blocks(n: RandomInputs) -> Arguments:
    w13 = n(EXPERTS, 2 * M // 128, D // 128, dtype=torch.float32).abs() / 20
    w2 = n(EXPERTS, D // 128, M // 128, dtype=torch.float32).abs() / 20
    codes = _experts_of_codes(ops.quant_fp8_group, n)
    return codes | {"w13_scale": w13, "w2_scale": w2, "block": 128}


def _experts_w4a16(n: RandomInputs) -> Arguments:
    found: Arguments = {"x": n(n.T, D), **_routed(n), "group": 32}
    for name, rows, columns in (("w13", 2 * M, D), ("w2", D, M)):
        found[name] = n.below(2**31 - 1, EXPERTS, rows, columns // 8, dtype=torch.int32)
        found[f"{name}_scale"] = n(EXPERTS, rows, columns // 32).abs() / 50
    return found


def _experts_mxfp4(n: RandomInputs) -> Arguments:
    codes = _experts_of_codes(ops.quant_mxfp4, n)
    return codes | {"x": n(n.T, D), "x_scale": None}


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


def _paged(n: RandomInputs) -> Arguments:
    """The last T tokens of a sequence of CONTEXT."""
    caches = n.caches()
    blocks = torch.arange(caches["k_cache"].shape[0], dtype=torch.int32, device=n.device)
    starts, length = (
        torch.tensor(given, dtype=torch.int32, device=n.device) for given in ([0, n.T], [CONTEXT])
    )
    return {
        "q": n(n.T, N, H),
        **caches,
        "query_start": starts,
        "seq_lens": length,
        "block_tables": blocks[None],
        "token": n(0),
        "scale": H**-0.5,
    }


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
    starts = torch.tensor([0, min(n.T, 1), n.T], dtype=torch.int32, device=n.device)
    heads = {name: n(n.T, N, H) for name in "qkv"}
    return {**heads, "query_start": starts, "scale": H**-0.5}


def _latent_paged(n: RandomInputs) -> Arguments:
    """The last T tokens of a sequence of CONTEXT."""
    cache = n(-(-CONTEXT // 16), 16, L + R)
    return {
        "q": n(n.T, N, L + R),
        "kv_cache": cache,
        "query_start": torch.tensor([0, n.T], dtype=torch.int32, device=n.device),
        "seq_lens": torch.tensor([CONTEXT], dtype=torch.int32, device=n.device),
        "block_tables": torch.arange(len(cache), dtype=torch.int32, device=n.device)[None],
        "token": n(0),
        "latent": L,
        "scale": (P + R) ** -0.5,
    }


def _latent_projected(n: RandomInputs) -> Arguments:
    given = _latent_paged(n) | {"q": n(n.T, N, P + R), "weight": n(N * (P + P), L) / L**0.5}
    del given["latent"]
    return given


def _indexed(n: RandomInputs) -> Arguments:
    return {"q": n(n.T, N, P), "k": n(n.T, P), "weights": n(n.T, N), "topk": CHOSEN}


def _indexed_in_cache(n: RandomInputs) -> Arguments:
    """The last T tokens of a sequence of CONTEXT."""
    given = _latent_paged(n) | _indexed(n) | {"index_cache": n(-(-CONTEXT // 16), 16, P)}
    for name in ("k", "kv_cache", "latent", "scale"):
        del given[name]
    return given


def _latent_of_chosen(n: RandomInputs) -> Arguments:
    positions = torch.arange(CHOSEN, dtype=torch.int32, device=n.device)
    return _latent_paged(n) | {"chosen": positions.expand(n.T, -1).contiguous()}


def _latent(n: RandomInputs) -> Arguments:
    cache = n(-(-CONTEXT // 16), 16, L + R)
    return {"kv_c": n(n.T, L), "k_pe": n(n.T, 1, R), "kv_cache": cache, "slots": n.slots()}


def _latent_queries(n: RandomInputs) -> Arguments:
    return _latent(n) | n.angles(R) | {"q_nope": n(n.T, N, L), "q_pe": n(n.T, N, R)}


def _by_head(scheme: str, n: RandomInputs) -> Arguments:
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


def _stored(scheme: str, n: RandomInputs) -> Arguments:
    """kv_b_proj of N heads, P columns of each for keys and P for values."""
    quantizer = ops.quant_mxfp4 if scheme == "mxfp4" else ops.quant_fp8_per_token
    codes, scale = n.quantized(quantizer, N * 2 * P, L)
    return {"weight": codes, "weight_scale": scale, "scheme": scheme}


def _stored_weight(scheme: str, n: RandomInputs) -> Arguments:
    return _stored(scheme, n) | {"dtype": n.dtype}


def _stored_keys(scheme: str, n: RandomInputs) -> Arguments:
    shape: Arguments = {"group": 128, "heads": N, "nope": P}
    return _stored(scheme, n) | shape | {"product": scheme, "codes": torch.float8_e4m3fn}


def _by_head_and_written(scheme: str, n: RandomInputs) -> Arguments:
    weights = _by_head(scheme, n)
    return (
        _latent(n)
        | n.angles(R)
        | {
            "q_nope": n(n.T, N, P),
            "q_pe": n(n.T, N, R),
            "weight": weights["weight"],
            "weight_scale": weights["weight_scale"],
            "scheme": scheme,
        }
    )


def _keys_and_values(n: RandomInputs) -> Arguments:
    """The rows of each head have P columns of the key and P of the value."""
    return _of_codes(ops.quant_fp8_per_token, n) | {
        "k_pe": n(n.T, M // (2 * P), R),
        "nope": P,
        "scheme": "fp8",
    }


def _convolved(n: RandomInputs) -> Arguments:
    return {"x": n(n.T, D), "weight": n(D, 4), "bias": n(D), "activation": "silu"}


def _ruled(n: RandomInputs) -> Arguments:
    """K key heads and N value heads."""
    q, k, v = n.heads(K, K, N)
    decay, beta = -n(n.T, N, dtype=torch.float32).abs(), n(n.T, N).sigmoid()
    return {"q": q, "k": k, "v": v, "g": decay, "beta": beta, "scale": H**-0.5}


def _with_slot(given: Arguments, name: str, state: Tensor, n: RandomInputs) -> Arguments:
    """The last T tokens of a sequence of CONTEXT, whose state is in the second of these slots."""
    starts, length = (
        torch.tensor(given, dtype=torch.int32, device=n.device) for given in ([0, n.T], [CONTEXT])
    )
    slot = torch.tensor([1], device=n.device)
    return given | {name: state, "query_start": starts, "seq_lens": length, "state_slots": slot}


def _convolved_in_steps(n: RandomInputs) -> Arguments:
    return _with_slot(_convolved(n), "conv_state", n(3, 3, D), n)


def _ruled_in_steps(n: RandomInputs) -> Arguments:
    return _with_slot(_ruled(n), "recurrent_state", n(3, N, H, H, dtype=torch.float32), n)


def _delta_gates(n: RandomInputs) -> Arguments:
    return {"a": n(n.T, N), "b": n(n.T, N), "A_log": n(N), "dt_bias": n(N)}


def _convolved_and_ruled(n: RandomInputs) -> Arguments:
    """Two key heads and N value heads of H columns."""
    channels = (2 * 2 + N) * H
    given = {"x": n(n.T, channels), "weight": n(channels, 4), "bias": None, **_delta_gates(n)}
    given |= {"conv_state": n(3, 3, channels), "activation": "silu", "scale": H**-0.5}
    return _with_slot(given, "recurrent_state", n(3, N, H, H, dtype=torch.float32), n)


def _scanned(n: RandomInputs) -> Arguments:
    """N heads of H columns and two groups of P numbers of state for each column."""
    (x,) = n.heads(N)
    small = [n(N, dtype=torch.float32) for _ in range(3)]
    given = dict(zip(("a_log", "d", "dt_bias"), small, strict=True))
    groups = {"b": n(n.T, 2, P), "c": n(n.T, 2, P)}
    return {"x": x, "dt": n(n.T, N), **given, **groups, "dt_min": 0.0, "dt_max": None}


def _scanned_in_steps(n: RandomInputs) -> Arguments:
    return _with_slot(_scanned(n), "recurrent_state", n(3, N, H, P, dtype=torch.float32), n)


EXAMPLES: dict[Op, dict[str, Callable[[RandomInputs], Arguments]]] = {
    ops.silu_and_mul: {"": _gated},
    ops.gelu_and_mul: {"": _gated, "tanh": partial(_gated, approximate="tanh")},
    ops.rms_norm: {"": _normed, "one_plus": partial(_normed, style="one_plus")},
    ops.add_rms_norm: {
        "": partial(_normed, residual=True),
        "one_plus": partial(_normed, residual=True, style="one_plus"),
    },
    ops.layer_norm: {"": _layer_normed},
    ops.add_layer_norm: {"": partial(_layer_normed, residual=True)},
    ops.add_rms_norm_pad: {"": partial(_normed, residual=True, columns=64)},
    ops.rms_norm_quant: {scheme: partial(_quantizing, _normed, scheme) for scheme in SCHEMES},
    ops.add_rms_norm_quant: {
        scheme: partial(_quantizing, partial(_normed, residual=True), scheme) for scheme in SCHEMES
    },
    ops.rms_norm_gated: {"": lambda n: _normed(n) | {"gate": n(n.T, D)}},
    ops.rms_norm_pair: {"": _normed_pair},
    ops.rms_norm_pair_quant: {
        **{scheme: partial(_quantized_pair, scheme) for scheme in SCHEMES},
        "one of them": partial(_quantized_pair, "fp8_group", quantize_y=False),
    },
    ops.silu_and_mul_quant: {scheme: partial(_quantizing, _gated, scheme) for scheme in SCHEMES},
    ops.quant_fp8_static: {
        "": lambda n: {"x": n(n.T, D), "scale": torch.tensor([0.02], device=n.device)}
    },
    ops.quant_fp8_per_token: {"": lambda n: {"x": n(n.T, D)}},
    ops.quant_fp8_group: {"": lambda n: {"x": n(n.T, D)}},
    ops.quant_int8_per_token: {"": lambda n: {"x": n(n.T, D)}},
    ops.quant_mxfp4: {"": lambda n: {"x": n(n.T, D)}},
    ops.count_experts: {
        "": lambda n: {
            "ids": n.below(EXPERTS, n.T, CHOSEN, dtype=torch.int32),
            "slots": n.slots(),
            "counts": n.below(1000, EXPERTS),
        },
    },
    ops.topk_route: {
        "": lambda n: {"logits": n(n.T, 64), "k": CHOSEN, "renormalize": True},
    },
    ops.linear_topk_route: {
        "": lambda n: {
            "x": n(n.T, D),
            "weight": n(64, D) / 16,
            "logits_dtype": n.dtype,
            "k": CHOSEN,
        },
    },
    ops.moe_experts: {"": _experts},
    ops.moe_experts_fp8: {
        "": partial(_experts_of_codes, ops.quant_fp8_per_token),
        "blocks": _experts_of_blocks,
    },
    ops.moe_experts_int8: {"": partial(_experts_of_codes, ops.quant_int8_per_token)},
    ops.moe_experts_w4a16: {"": _experts_w4a16},
    ops.moe_experts_mxfp4: {"": _experts_mxfp4},
    ops.linear: {"": _linear, "bias": lambda n: _linear(n) | {"bias": n(M)}},
    ops.scaled_linear_fp8: {"": partial(_of_codes, ops.quant_fp8_per_token)},
    ops.scaled_linear_fp8_block: {"": _blocks},
    ops.scaled_linear_int8: {"": partial(_of_codes, ops.quant_int8_per_token)},
    ops.linear_w4a16: {"": _w4a16},
    ops.linear_mxfp4: {"16 bits": _mxfp4_a16, "mxfp4": partial(_of_codes, ops.quant_mxfp4)},
    ops.embedding: {"": lambda n: {"ids": n.below(100, n.T), "weight": n(100, D)}},
    ops.rope: {"": lambda n: {"x": n(n.T, N, H), **n.angles()}},
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
            "index_cache": n(-(-CONTEXT // 16), 16, P),
            "slots": n.slots(),
        }
    },
    ops.paged_index_topk: {"": _indexed_in_cache},
    ops.chosen_mask: {"": lambda n: {"chosen": n.below(n.T, n.T, CHOSEN, dtype=torch.int32)}},
    ops.mla_paged_attention: {"": _latent_projected},
    ops.kv_b_weight: {scheme: partial(_stored_weight, scheme) for scheme in ("fp8", "mxfp4")},
    ops.kv_b_keys: {scheme: partial(_stored_keys, scheme) for scheme in ("fp8", "mxfp4")},
    ops.linear_by_head: {"": lambda n: {"x": n(n.T, N, P), "weight": n(N, L, P)}},
    ops.mla_kv_write: {"": _latent},
    ops.mla_rope_kv_write: {"": _latent_queries},
    ops.scaled_bmm_fp8: {"": partial(_by_head, "fp8")},
    ops.bmm_mxfp4: {"": partial(_by_head, "mxfp4")},
    ops.causal_conv1d: {"": _convolved},
    ops.causal_conv1d_update: {"": _convolved_in_steps},
    ops.gated_delta_rule: {"": _ruled},
    ops.gated_delta_rule_update: {"": _ruled_in_steps},
    ops.delta_gates: {"": _delta_gates},
    ops.conv_gated_delta_rule_update: {"": _convolved_and_ruled},
    ops.ssm_scan: {"": _scanned},
    ops.ssm_scan_update: {"": _scanned_in_steps},
    ops.bmm_rope_kv_write: {
        scheme: partial(_by_head_and_written, scheme) for scheme in ("fp8", "mxfp4")
    },
    ops.linear_split_cat: {"": _keys_and_values},
}
