"""Attention that is written out in PyTorch: what becomes one op, with which masks, and what does
not.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes, explained, rewritten
from torch import Tensor

from atomc import explain, passes

PASSES = [p for p in passes.PIPELINE if p.name in ("tidy", "attention")]
RANDOM = torch.Generator().manual_seed(0)
B, N, T, D = 2, 3, 7, 10
EXACT = 1e-6


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM)


Q, K, V = rand(B, N, T, D), rand(B, N, T, D), rand(B, N, T, D)
LOWEST = torch.finfo(torch.float32).min


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * 0.3
    return F.softmax(scores if mask is None else scores + mask, -1) @ v


def later(t: int = T) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).triu(1)


def compared(rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """A mask of the columns after a row."""
    columns = rows if columns is None else columns
    return torch.where(columns <= rows[:, None], 0.0, LOWEST)


MASKS = {
    "triu of a filled matrix": lambda: torch.full((T, T), float("-inf")).triu(1),
    "masked_fill by triu": lambda: torch.zeros(T, T).masked_fill(later(), LOWEST),
    "where tril": lambda: torch.where(torch.ones(T, T, dtype=torch.bool).tril(), 0.0, LOWEST),
    "compared positions": lambda: torch.where(
        torch.arange(T)[None, None, None] <= torch.arange(T)[None, None, :, None],
        torch.zeros(()),
        LOWEST,
    ).expand(B, 1, T, T),
    "rows compared with columns": lambda: torch.zeros(T, T).masked_fill(
        torch.arange(T)[:, None] < torch.arange(T), LOWEST
    ),
    "positions in float32": lambda: compared(torch.arange(T).float()),
}
OTHER_MASKS = {
    "a strict triangle": lambda: torch.zeros(T, T).masked_fill(
        later() | torch.eye(T).bool(), -1e38
    ),
    "one key more": lambda: torch.full((T, T), LOWEST).triu(2),
    "earlier keys": lambda: torch.full((T, T), LOWEST).tril(-1),
    "a weak mask": lambda: torch.full((T, T), -10.0).triu(1),
    "columns compared with later rows": lambda: torch.where(
        torch.arange(T) <= torch.arange(1, T + 1)[:, None], 0.0, LOWEST
    ),
    "rows and columns swapped": lambda: torch.where(
        torch.arange(T)[:, None] <= torch.arange(T), 0.0, LOWEST
    ),
}


def sites(function, *inputs, dynamic=False, **options):
    tolerance = EXACT if inputs[0].dtype == torch.float32 else 2**-7
    report = explained(function, *inputs, dynamic=dynamic, tolerance=tolerance, **options)
    return [site.attrs for site in report.sites if site.rewrite == "attention"]


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_hides_exactly_the_later_keys_becomes_causal(mask):
    found = sites(lambda q, k, v: attend(q, k, v, MASKS[mask]()), Q, K, V)
    assert found == [{"causal": True, "mask": False}]


@pytest.mark.parametrize("mask", OTHER_MASKS)
def test_another_mask_stays_a_mask(mask):
    found = sites(lambda q, k, v: attend(q, k, v, OTHER_MASKS[mask]()), Q, K, V)
    assert found == [{"causal": False, "mask": True}]


@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.full((1, T), LOWEST).triu(1),
        lambda: torch.full((1, T), LOWEST).triu(1).expand(T, T),
        lambda: torch.zeros(T, T).masked_fill(torch.ones(1, T, dtype=torch.bool).triu(1), LOWEST),
        lambda: torch.where(torch.ones(1, T, dtype=torch.bool).tril() & ~later(), 0.0, LOWEST),
        lambda: torch.full((T, 1), -1e38).triu(1),
        lambda: compared(torch.arange(T), torch.arange(1)),
        lambda: compared(torch.arange(T), torch.arange(1).expand(T)),
    ],
)
def test_a_triangle_of_one_row_or_key_that_is_broadcast_stays_a_mask(mask):
    found = sites(lambda q, k, v: attend(q, k, v, mask()), Q, K, V)
    assert found == [{"causal": False, "mask": True}]


S = T + 4
OF_MORE_KEYS = {
    "top left": (True, lambda: torch.full((T, S), LOWEST).triu(1)),
    "top left, compared": (True, lambda: compared(torch.arange(T), torch.arange(S))),
    "bottom right": (False, lambda: torch.full((T, S), LOWEST).triu(S - T + 1)),
    "bottom right, compared": (False, lambda: compared(torch.arange(S - T, S), torch.arange(S))),
    "bottom right, shifted": (
        False,
        lambda: compared(torch.arange(T) + (S - T), torch.arange(S)),
    ),
    "the last rows of a triangle": (False, lambda: torch.full((S, S), LOWEST).triu(1)[-T:]),
}


@pytest.mark.parametrize("name", OF_MORE_KEYS)
def test_only_a_triangle_from_the_first_key_is_causal_if_there_are_more_keys(name):
    causal, mask = OF_MORE_KEYS[name]
    q, k, v = rand(B, N, T, D), rand(B, N, S, D), rand(B, N, S, D)
    found = sites(lambda q, k, v: attend(q, k, v, mask()), q, k, v)
    assert found == [{"causal": causal, "mask": not causal}]


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    hidden = ~((columns <= rows) & (columns > rows - 2))
    return (q @ k.mT).masked_fill(hidden, LOWEST).softmax(-1) @ v


def test_a_window_is_recognized_only_if_every_query_sees_a_key():
    more = rand(B, N, S, D)
    window = {"causal": True, "mask": False, "window": 2}
    assert sites(windowed, Q, K, V) == sites(windowed, Q, more, more) == [window]
    assert sites(windowed, more, K, V) == [{"causal": False, "mask": True}]
    assert sites(windowed, Q, K, V, dynamic=True) == [window]


LONG = 300  # bfloat16 rounds positions from 257 on
ROUNDED = {
    "cast to bfloat16": lambda: compared(torch.arange(LONG).bfloat16()),
    "one of both": lambda: compared(torch.arange(LONG).bfloat16(), torch.arange(LONG)),
    "cast to bfloat16 and back": lambda: compared(torch.arange(LONG).bfloat16().float()),
    "made in bfloat16": lambda: compared(torch.arange(LONG, dtype=torch.bfloat16)),
    "cast and moved": lambda: compared(torch.arange(LONG).bfloat16()[None].mT.view(LONG)),
    "cast to float16": lambda: compared(torch.arange(LONG).half()),
    "cast to uint8": lambda: compared(torch.arange(LONG).to(torch.uint8)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_mask_of_rounded_positions_stays_a_mask_with_a_reason(name):
    q, k, v = (rand(1, 1, LONG, D) for _ in range(3))
    report = explained(lambda q, k, v: attend(q, k, v, ROUNDED[name]()), q, k, v, tolerance=EXACT)
    assert [site.attrs for site in report.sites] == [{"causal": False, "mask": True}]
    [miss] = report.misses("attention")
    assert (miss.variant, miss.kind) == ("causal", "dtype")
    assert "expected positions in int64, int32 or float32; found" in miss.text()


def test_a_mask_from_outside_stays_a_mask_even_if_it_is_causal():
    mask = torch.zeros(T, T).masked_fill(later(), LOWEST)
    assert sites(attend, Q, K, V, mask) == [{"causal": False, "mask": True}]


def test_a_causal_mask_beside_one_from_outside_stays_a_mask():
    padding = torch.zeros(B, 1, 1, T)
    padding[1, ..., 5:] = LOWEST

    def both(q, k, v, padding):
        return attend(q, k, v, torch.zeros(T, T).masked_fill(later(), LOWEST) + padding)

    assert sites(both, Q, K, V, padding) == [{"causal": False, "mask": True}]


def test_keys_hidden_twice_weigh_as_much_as_others_in_a_row_without_visible_keys():
    padding = torch.zeros(B, 1, 1, T, dtype=torch.bool)
    padding[1, ..., :3] = True

    def filled(q, k, v, hidden):
        scores = (q @ k.mT).masked_fill(later(), LOWEST).masked_fill(hidden, LOWEST)
        return scores.softmax(-1) @ v

    def added_and_filled(q, k, v, hidden):
        return (q @ k.mT + hidden * LOWEST).masked_fill(later(), LOWEST).softmax(-1) @ v

    masked = [{"causal": False, "mask": True}]
    assert sites(filled, Q, K, V, padding) == sites(added_and_filled, Q, K, V, padding) == masked


def test_a_causal_mask_of_dynamic_length_becomes_causal():
    def causal(q, k, v):
        t = torch.arange(q.shape[2])
        return attend(q, k, v, torch.where(t <= t[:, None], 0.0, LOWEST))

    assert sites(causal, Q, K, V, dynamic=True) == [{"causal": True, "mask": False}]


def test_merged_heads_of_dynamic_length_become_one_op():
    def merged(q, k, v):
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
        weights = scores.view(*q.shape[:3], k.shape[2]).softmax(-1)
        return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))

    assert len(sites(merged, Q, K, V, dynamic=True)) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_on_a_view_with_heads_apart_leaves_merged_heads_to_one_op(dynamic):
    def masked(q, k, v):
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
        apart = scores.view(*q.shape[:3], k.shape[2]) + MASKS["compared positions"]()
        return torch.bmm(apart.flatten(0, 1).softmax(-1), v.flatten(0, 1))

    found = sites(masked, Q, K, V, dynamic=dynamic)
    assert found == [{"causal": True, "mask": False}]


def test_a_mask_of_each_head_is_one_of_merged_heads_as_well():
    bias = rand(1, N, T, T)

    def masked(q, k, v):
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
        apart = scores.view(B, N, T, T) + bias
        return torch.bmm((apart.flatten(0, 1) * 0.5).softmax(-1), v.flatten(0, 1))

    assert sites(masked, Q, K, V, glue="eager") == [{"causal": False, "mask": True}]


def test_a_row_whose_keys_are_all_hidden_is_eagers_mean_of_the_values():
    mask = torch.zeros(B, 1, T, T)
    mask[1, :, :3] = LOWEST
    assert sites(attend, Q, K, V, mask) == [{"causal": False, "mask": True}]


def test_subtracting_the_largest_score_changes_nothing():
    def stable(q, k, v):
        scores = q @ k.mT
        return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v

    assert len(sites(stable, Q, K, V)) == 1


def test_keys_repeated_for_groups_of_queries_are_read_once():
    def grouped(q, k, v):
        return attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))

    text = rewritten(PASSES, grouped, Q, K[:, :1], V[:, :1], tolerance=EXACT)
    assert "expand" not in text


def repeated(x: Tensor) -> Tensor:
    return x[:, :, None].expand(B, x.shape[1], 2, *x.shape[2:]).reshape(B, -1, *x.shape[2:])


@pytest.mark.parametrize("shape", [(1, D), (T, 1), (1, 1)], ids=["one key", "width one", "both"])
def test_keys_repeated_for_groups_are_read_once_at_any_size_one(shape):
    q, k, v = rand(B, 2 * N, T, shape[1]), rand(B, N, *shape), rand(B, N, shape[0], D)

    def grouped(q, k, v):
        return attend(q, repeated(k), repeated(v))

    text = rewritten(PASSES, grouped, q, k, v, tolerance=EXACT)
    assert "expand" not in text


def test_heads_and_keys_of_one_value_that_are_swapped_are_not_confused():
    q, swapped, v = rand(B, N, T, 1), rand(B, N, 1, N), rand(B, N, N, D)

    def attend_swapped(q, k, v):
        return (q @ k.permute(0, 3, 2, 1)).softmax(-1) @ v

    assert len(sites(attend_swapped, q, swapped, v)) == 1


def test_a_quotient_that_is_rounded_is_no_scale():
    def rounded(q, k, v):
        return torch.div(q @ k.mT, 0.5, rounding_mode="floor").softmax(-1) @ v

    report = explained(rounded, Q, K, V, tolerance=EXACT)
    assert "expected scale, softcap or mask; found div" in report.why("attention")


def test_rounding_as_the_model_keeps_attention_in_16_bits_written_out():
    halves = [x.bfloat16() for x in (Q, K, V)]
    report = explained(attend, *halves, rounding="hf", tolerance=2**-7)
    assert "rounding='hf' keeps scores and weights rounded to torch.bfloat16" in report.why(
        "attention"
    )
    assert len(sites(attend, Q, K, V, rounding="hf")) == 1


def minus_other(q, k, v):
    scores = q @ k.mT
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def sinks_kept(q, k, v):
    sinks = torch.ones(N).view(1, N, 1, 1).expand(B, N, T, 1)
    weights = torch.cat((q @ k.mT, sinks), -1).softmax(-1)
    return weights[..., 1:] @ v


def bool_added(q, k, v):
    return (q @ k.mT + later()).softmax(-1) @ v


def over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def two_products(q, k, v):
    return (q @ k.mT + k @ q.mT).softmax(-1) @ v


def clamped(q, k, v):
    return (q @ k.mT).clamp(-5, 5).softmax(-1) @ v


def scores_returned(q, k, v):
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores


def values_first(q, k, v):
    return v.mT @ (q @ k.mT).softmax(-1)


def weakly_filled(q, k, v):
    return (q @ k.mT).masked_fill(later(), -1e4).softmax(-1) @ v


def mask_of_other_heads(q, k, v):
    scores = (q @ k.mT).view(N, B, T, T) + torch.arange(float(N)).view(N, 1, 1, 1) * later()
    return scores.view(B, N, T, T).softmax(-1) @ v


def triangle_of_other_rows(q, k, v):
    scores = (q @ k[:, :, :5].mT).view(B, N, 5, T) + torch.full((5, T), LOWEST).triu(1)
    return scores.view(B, N, T, 5).softmax(-1) @ v[:, :, :5]


def in_fp64(q, k, v):
    return attend(q.double(), k.double(), v.double())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (minus_other, "scores minus the largest; found sub"),
        (sinks_kept, "weights .*; found slice"),
        (bool_added, "a float mask; found torch.bool added"),
        (weakly_filled, "a mask that fills with -1.0e\\+38 or less; found -10000.0"),
        (over_queries, "softmax over keys"),
        (two_products, "one product of queries and keys"),
        (clamped, "scale, softcap or mask; found clamp"),
        (scores_returned, "the graph returns it"),
        (values_first, "weights @ values"),
        (mask_of_other_heads, r"a mask for scores \[2, 3, 7, 7\]; found \[3, 2, 7, 7\]"),
        (triangle_of_other_rows, r"a mask for scores \[2, 3, 7, 5\]; found \[2, 3, 5, 7\]"),
        (in_fp64, "in torch.float64"),
    ],
)
def test_what_the_op_does_not_compute_is_left_alone_with_a_reason(function, reason):
    report = explained(function, Q, K, V, tolerance=EXACT)
    assert report.matches["attention"] == 0
    assert re.search(reason, report.why("attention")), report.why("attention")


def test_scores_filled_with_nan_are_not_masked():
    def filled(q, k, v):
        return torch.where(later(), torch.nan, q @ k.mT).softmax(-1) @ v

    assert not after_passes(PASSES, filled, Q, K, V).report.matches["attention"]


def test_a_router_is_not_nearly_attention():
    def router(x, w):
        return F.linear(x, w).softmax(-1).topk(2).values

    report = explained(router, rand(T, D), rand(5, D), tolerance=EXACT)
    assert not report.misses("attention")


WIDTHS = {"vocab_size": 64, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
STOCK = {
    "gemma2": WIDTHS,
    "gpt_oss": WIDTHS | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "bloom": {"vocab_size": 64},
    "gpt_neo": {"vocab_size": 64, "attention_types": [[["global"], 1]], "num_layers": 1},
}


@pytest.mark.covering
@pytest.mark.parametrize("name", STOCK)
def test_eager_attention_of_transformers_with_padding_is_one_op_a_layer(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        name, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **STOCK[name]
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, :3] = 0

    def logits(ids, mask):
        return model.eval()(ids, attention_mask=mask, use_cache=False).logits

    ids = torch.randint(0, 64, (2, T))
    report = explained(logits, ids, mask, tolerance=1e-5, glue="eager")  # else a CPU keeps ALiBi
    assert report.matches["attention"] == 1, report.why("attention")


def with_alibi(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.25 + bias
    return scores.masked_fill(hidden, -3e38).softmax(-1) @ v


def alibi_inputs(rows: int, dtype: torch.dtype, columns: int = 0) -> tuple[Tensor, ...]:
    columns = columns or rows
    q, k, v = (torch.randn(1, 4, n, 16).to(dtype) for n in (rows, columns, columns))
    bias = torch.arange(4)[:, None, None] * torch.arange(float(columns))
    return q, k, v, bias.to(dtype), torch.ones(rows, columns, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "rows, columns, dtype, platform, glue, fires",
    [
        (9, 9, torch.bfloat16, "cpu-zen4", "auto", False),
        (1024, 1024, torch.float16, "cpu-zen4", "auto", False),
        (1025, 9, torch.bfloat16, "cpu-zen4", "auto", True),
        (9, 9, torch.bfloat16, "cpu-zen4", "eager", False),
        (9, 9, torch.bfloat16, "h200", "auto", True),
        (9, 9, torch.float32, "cpu-zen4", "auto", False),
        (9, 9, torch.float32, "cpu-zen4", "eager", True),
        (9, 9, torch.float32, "h200", "auto", True),
        (64, 128, torch.float32, "cpu-zen4", "auto", False),
        (64, 129, torch.float32, "cpu-zen4", "auto", True),
        (1, 9000, torch.float32, "cpu-zen4", "auto", False),
        (2, 9000, torch.float32, "cpu-zen4", "auto", True),
    ],
)
def test_few_queries_with_a_bias_of_each_head_stay_as_they_are_on_a_cpu(
    rows: int, columns: int, dtype: torch.dtype, platform: str, glue: str, fires: bool
) -> None:
    inputs = alibi_inputs(rows, dtype, columns)
    report = explain(with_alibi, *inputs, platform=platform, options={"glue": glue})
    assert report.matches["attention"] == fires
    assert fires or "slower than the written form" in report.why("attention")


def with_alibi_of_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    bias = torch.arange(1, q.shape[1] + 1)[:, None, None] * (columns - columns[-1])
    return with_alibi(q, k, v, bias.to(q.dtype), columns > rows[:, None])


@pytest.mark.parametrize(
    "rows, dtype, fires",
    [(90, torch.bfloat16, False), (90, torch.float32, False), (91, torch.float32, True)],
)
def test_a_bias_that_the_graph_builds_from_positions_is_one_of_each_head(
    rows: int, dtype: torch.dtype, fires: bool
) -> None:
    inputs = alibi_inputs(rows, dtype)[:3]
    report = explain(with_alibi_of_positions, *inputs, platform="cpu-zen4")
    assert report.matches["attention"] == fires, report.why("attention")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mask_of_all_heads_takes_the_op_on_a_cpu_at_any_size(dtype: torch.dtype) -> None:
    q, k, v, bias, hidden = alibi_inputs(9, dtype)
    report = explain(with_alibi, q, k, v, bias[:1], hidden, platform="cpu-zen4")
    assert report.matches["attention"] == 1, report.why("attention")


def test_a_mask_of_each_head_takes_the_fused_kernel_of_a_cpu() -> None:
    args = alibi_inputs(9, torch.float32)
    compiled = torch.compile(with_alibi, backend="atom", options={"glue": "eager"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), with_alibi(*args))
        with torch.profiler.profile() as profile:
            compiled(*args)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
