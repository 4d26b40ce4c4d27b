"""The tables of rotary positions become one op where a kernel serves it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import Traced, after_passes
from torch import Tensor, nn

import atomc
from atomc import passes
from atomc.compiler.select import Selection
from atomc.models.mrope import MRotary
from atomc.models.rotary import Rope, Rotary
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

TIDY, TABLES = (p for p in passes.PIPELINE if p.name in ("tidy", "rotary_tables"))
POSITIONS = torch.tensor([[0, 7, 131071, 5, 1000000], [9, 8, 7, 6, 5]])
FREQUENCIES = 1e4 ** (-torch.arange(3) / 3)


def tables(
    function: Callable[..., Any],
    *inputs: Tensor,
    platform: str = "h200",
    dynamic: bool = False,
) -> Traced:
    """The graph after the pass, with the kernels of a platform."""
    where = Platform.named(platform)
    context = Context(Options(), where, first=Selection(Options(), where, eager=False).first)
    traced = after_passes([TIDY, TABLES], function, *inputs, dynamic=dynamic, context=context)
    assert traced.error < 1e-6
    return traced


def products(positions: Tensor, inv_freq: Tensor) -> Tensor:
    return positions[..., None].float() * inv_freq


def matmul(positions: Tensor, inv_freq: Tensor) -> Tensor:
    column = inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
    return (column @ positions[:, None, :].float()).transpose(1, 2)


def neox(angles: Tensor) -> Tensor:
    return torch.cat((angles, angles), -1)


def pairs(angles: Tensor) -> Tensor:
    return torch.repeat_interleave(angles, 2, dim=-1)


def half(angles: Tensor) -> Tensor:
    return angles


def both(
    angles: Tensor, scaling: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("repeat", [neox, pairs, half])
@pytest.mark.parametrize("multiply", [products, matmul])
def test_cos_and_sin_of_positions_times_frequencies_become_one_op(
    multiply: Callable[..., Tensor], repeat: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    model = nn.Module()
    model.inv_freq = nn.Buffer(FREQUENCIES)

    def function(positions: Tensor) -> tuple[Tensor, ...]:
        # No strides of the tables are returned.
        return tuple(x.flatten() for x in both(repeat(multiply(positions, model.inv_freq)), 1.25))

    text = tables(function, POSITIONS, dynamic=dynamic).text
    assert f"'{repeat.__name__}', 1.25, bfloat16)" in text
    assert not any(op in text for op in ("cos(", "sin(", "_to_copy(", "bmm(", "cat("))


def test_tables_in_fp32_without_scaling() -> None:
    def function(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        return both(neox(products(positions, inv_freq)), dtype=torch.float32)

    assert tables(function, POSITIONS, FREQUENCIES).text.splitlines()[-2:] == [
        "%1 = rotary_tables(%0, inv_freq, 'neox', 1.0, float32)",
        "return %1.0, %1.1",
    ]


def test_frequencies_may_be_in_16_bits() -> None:
    def function(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        return both(neox(matmul(positions, inv_freq)))

    text = tables(function, POSITIONS, FREQUENCIES.bfloat16()).text
    assert "inv_freq, 'neox', 1.0, bfloat16)" in text and "_to_copy" not in text


def test_frequencies_may_be_computed_as_in_longrope() -> None:
    def function(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        longer = torch.where(positions.max() > 64, inv_freq / 2, inv_freq)
        return both(neox(products(positions, longer)))

    assert tables(function, POSITIONS, FREQUENCIES).report.num_ops == {"rotary_tables": 1}


def test_a_frequency_that_is_repeated_is_no_vector_of_them() -> None:
    def function(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        return both(products(positions, inv_freq[1:2].expand(3).float()))

    assert tables(function, POSITIONS, FREQUENCIES.bfloat16()).report.num_ops


def test_two_tables_share_positions() -> None:
    def function(positions: Tensor, inv_freq: Tensor, local: Tensor) -> tuple[Tensor, ...]:
        return *both(products(positions, inv_freq)), *both(products(positions, local))

    traced = tables(function, POSITIONS, FREQUENCIES, FREQUENCIES / 3)
    assert traced.report.num_ops == {"rotary_tables": 2} and "_to_copy" not in traced.text


def test_a_table_with_strides_that_the_op_does_not_give_is_returned_with_them() -> None:
    def function(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        return both(matmul(positions, inv_freq))

    assert function(POSITIONS, FREQUENCIES)[0].stride() == (15, 1, 5)
    assert "clone" in tables(function, POSITIONS, FREQUENCIES).text


SCALED: Rope = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_tables_of_own_models_become_the_op() -> None:
    rotary = Rotary(SCALED, 8)
    text = tables(lambda x, positions: rotary(x, positions), torch.ones(1).bfloat16(), POSITIONS)
    assert "'neox', 1.138629436111989, bfloat16)" in text.text


def test_columns_may_have_positions_of_their_own() -> None:
    rotary = MRotary(SCALED, 8, (2, 1, 1))
    positions = torch.stack((POSITIONS, POSITIONS + 3, POSITIONS // 2))
    traced = tables(lambda x, p: rotary(x, p), torch.ones(2, 5, 4).bfloat16(), positions)
    assert traced.report.num_ops == {"rotary_tables": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda angles: (angles.cos() * 2, angles.sin() * 3),
        lambda angles: (angles.cos().bfloat16(), angles.sin()),
        lambda angles: (angles.cos().bfloat16(), angles.sin().bfloat16(), angles.cos() + 1),
    ],
)
def test_tables_that_differ_are_scaled_and_cast_behind_the_op(function: Callable[..., Any]) -> None:
    text = tables(lambda p, f: function(products(p, f)), POSITIONS, FREQUENCIES).text
    assert "'half', 1.0, float32)" in text


def test_without_a_kernel_the_report_says_so() -> None:
    traced = tables(lambda p, f: both(products(p[:, None, None], f)), POSITIONS, FREQUENCIES)
    assert [miss.expected for miss in traced.report.near] == ["a kernel for rotary_tables"]
    assert not traced.report.num_ops and "rotary_tables" not in traced.text


@pytest.mark.parametrize(
    "function",
    [
        lambda p, f: products(p, f).cos(),
        lambda p, f: both(products(p, f) + f),
        lambda p, f: both(p[..., None].float() * (f + p[..., None])),
        lambda p, f: both(p[..., None].bfloat16() * f.bfloat16()),
        lambda p, f: both(torch.cat((products(p, f), products(p, f / 2)), -1)),
        lambda p, f: both(products(p, f).repeat(1, 1, 2)[..., None]),
    ],
    ids=["cos", "a sum", "frequencies of tokens", "16 bits", "other halves", "a view"],
)
def test_other_angles_are_left_alone(function: Callable[..., Any]) -> None:
    report = tables(function, POSITIONS, FREQUENCIES).report
    assert not report.num_ops and not report.near


def test_on_a_cpu_the_tables_are_left_to_inductor() -> None:
    def function(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        return both(products(positions, inv_freq))

    report = tables(function, POSITIONS, FREQUENCIES, platform="cpu").report
    assert not report.num_ops and not report.near


# Gemma 3 has tables for layers with a window, and others for those without.
STOCK = {"qwen3": 1, "olmo2": 1, "gpt_oss": 1, "cohere": 1, "gemma3_text": 2}


@pytest.mark.parametrize("kind", STOCK)
def test_tables_of_stock_models(kind: str) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 6 if kind == "gemma3_text" else 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False)
    report = atomc.explain(model, torch.arange(5)[None], use_cache=False, platform="h200")
    assert report.matches["rotary_tables"] == STOCK[kind]
    assert "aten.cos" not in report.stages[-1].text
    assert {each.chosen for each in report.kernels if each.op == "rotary_tables"} == {"triton"}
