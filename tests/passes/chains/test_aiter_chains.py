"""The fused chains for which AITER has kernels: each fires in a stock class of transformers, as
often as a formula of its layers says. docs/rewrites.md has the same table.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from kernel_cases.rows import one_process_group
from test_counts import STRICT, per_change
from test_counts import stock as dense
from test_mla_quantized import SIZES
from test_mla_recognition import stock as latent
from test_quant_counts import quantized
from torch import Tensor, distributed, nn

import atomc
from atomc import program
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.vocab import sum_lookups
from atomc.platform import Platform
from atomc.report.report import Report
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

one_process_group()


class ParallelRows(nn.Linear):
    """A linear layer whose inputs are cut over processes: it adds up their results."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.all_reduce(super().forward(x), "sum", distributed.group.WORLD)


class PaddedMLP(nn.Module):
    """An MLP whose projections take 32 more columns, of zeros."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight = nn.Parameter(F.pad(layer.weight, (0, 32)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(F.pad(x, (0, 32)))


def in_parallel(model: nn.Module) -> nn.Module:
    sum_lookups(model.model.embed_tokens, TensorParallel(0, 1, one_process_group()))
    for layer in model.model.layers:
        layer.self_attn.o_proj.__class__ = layer.mlp.down_proj.__class__ = ParallelRows
    return model


def padded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp = PaddedMLP(layer.mlp)
    return model


def compiled(model: nn.Module) -> Report:
    return atomc.explain(model, options=STRICT)


def served(model: nn.Module, platform: str | None = None, **options: str) -> Report:
    where = Platform.named(platform) if platform else None
    model = wrap_stock(model)
    model = model.bfloat16().to("meta") if platform else model
    given = {**STRICT, **options, "cache": False}
    return program.compile_model(model, given, platform=where, owned=True).report


def llama(layers: int, scheme: str | None = None) -> nn.Module:
    model = dense("llama", layers, "cpu")
    return quantized(model, scheme) if scheme else model


def deepseek(layers: int, scheme: str | None = None) -> nn.Module:
    model = latent("deepseek_v3", layers, **SIZES)
    return atomc.quantize(model, scheme) if scheme else model


class Chain(NamedTuple):
    """where: the model and scheme, as the documentation calls them; fired: by the number of layers."""

    where: str
    report: Callable[[int], Report]
    fired: Callable[[int], dict[str, int]]


def norms(scheme: str) -> Callable[[int], dict[str, int]]:
    return lambda n: {f"rms_norm_quant[{scheme}]": 1, f"add_rms_norm_quant[{scheme}]": 2 * n - 1}


def once(name: str) -> Callable[[int], dict[str, int]]:
    return lambda n: {name: n}


FP8_CACHE: dict[str, Any] = {"kv_cache_dtype": "fp8"}
CHAINS = {
    1: Chain("Llama, fp8 with static scales", lambda n: compiled(llama(n, "static")), norms("fp8_static")),
    2: Chain("Llama, mxfp4", lambda n: compiled(llama(n, "mxfp4")), norms("mxfp4")),
    3: Chain("Llama, its MLPs with padded inputs", lambda n: compiled(padded(llama(n))), once("add_rms_norm_pad")),
    4: Chain("Llama, `embed_tokens`, `o_proj` and `down_proj` over processes", lambda n: compiled(in_parallel(llama(n))),
             lambda n: {"allreduce_rms_norm": 1, "allreduce_add_rms_norm": 2 * n}),
    5: Chain("Llama, fp8 with static scales", lambda n: compiled(llama(n, "static")), once("silu_and_mul_quant[fp8_static]")),
    6: Chain("Llama, mxfp4", lambda n: compiled(llama(n, "mxfp4")), once("silu_and_mul_quant[mxfp4]")),
    7: Chain("Qwen3, served, fp8 cache", lambda n: served(dense("qwen3", n, "cpu"), **FP8_CACHE),
             once("qk_norm_rope_kv_write[fp8]")),
    8: Chain("Llama, served, fp8 cache", lambda n: served(llama(n), **FP8_CACHE), once("rope_kv_write[fp8]")),
    9: Chain("DeepSeek-V3, served, fp8 cache", lambda n: served(deepseek(n), **FP8_CACHE), once("mla_rope_kv_write[fp8]")),
    10: Chain("DeepSeek-V3, mxfp4", lambda n: compiled(deepseek(n, "mxfp4")), once("linear_split_cat[mxfp4]")),
    11: Chain("DeepSeek-V3, fp8_block", lambda n: compiled(deepseek(n, "fp8_block")), once("linear_split_cat[fp8_block]")),
    12: Chain("DeepSeek-V3, fp8_block, served on a GPU", lambda n: served(deepseek(n, "fp8_block"), "gfx950"),
              once("bmm_rope_kv_write[fp8]")),
    13: Chain("DeepSeek-V3, mxfp4, served on a GPU", lambda n: served(deepseek(n, "mxfp4"), "gfx950"),
              once("bmm_rope_kv_write[mxfp4]")),
}  # fmt: skip


@cache
def report_of(where: str, layers: int) -> Report:
    """Of the first chain with this model, which others share."""
    return next(chain for chain in CHAINS.values() if chain.where == where).report(layers)


# Per change two layers of dense models; one of DeepSeek-V3's, which take longest and whose rewrites
# test_latent_chains.py counts as well, takes turns.
@pytest.mark.parametrize(
    ("number", "layers"),
    [
        pytest.param(number, 1, marks=pytest.mark.rotating)
        if "DeepSeek" in chain.where and layers == 1
        else per_change(number, layers, now=layers == 2 and "DeepSeek" not in chain.where)
        for number, chain in CHAINS.items()
        for layers in (1, 2, 4)
    ],
)
def test_each_chain_fires_in_a_stock_class_by_formula(number: int, layers: int) -> None:
    chain = CHAINS[number]
    report, expected = report_of(chain.where, layers), chain.fired(layers)
    assert report.treated and report.bugs == []
    assert {name: report.matches[name] for name in expected} == expected


def test_the_documentation_names_the_class_of_each_chain() -> None:
    text = (Path(__file__).parents[3] / "docs/rewrites.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \| ", line)]
    assert {int(row[1]): row[6].strip() for row in rows} == {
        number: chain.where for number, chain in CHAINS.items()
    }
