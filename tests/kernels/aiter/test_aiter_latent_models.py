"""Models of latent attention lowered to AITER, over stand-ins for its compiled functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from test_moe_models import KINDS, theirs_of
from tiny_experts import sqnr
from torch import Tensor, nn

from atomc import ops
from atomc.kernels.aiter.latent import indexer, latent_attention
from atomc.loading.create_model import create_model
from atomc.ops.op import Op
from atomc.ops.state import GroupStep, Step
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.stock.adapter import wrap_stock

pytest.importorskip("transformers")

DEEPSEEK = KINDS["deepseek_v3"][1] | {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
}
HERE = replace(Platform.named("gfx950"), device="cpu", here=True)
BLOCK, BLOCKS = 16, 24  # of a sequence


@pytest.fixture(params=["ours", pytest.param("stock", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return built(request.param)


def built(whose: str) -> nn.Module:
    torch.manual_seed(0)
    stock = theirs_of("deepseek_v3", **DEEPSEEK).to(torch.bfloat16)
    if whose == "stock":
        return wrap_stock(stock).eval()
    config = stock.config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    ours = create_model(config, torch.bfloat16).requires_grad_(False).eval()
    for parameter in ours.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return ours


def step(ids: Tensor, new: list[int], lengths: list[int]) -> Step:
    """`new` tokens of each sequence, which then have these lengths; sequence s has the blocks from
    s * BLOCKS on.
    """
    positions = torch.cat([torch.arange(n - m, n) for m, n in zip(new, lengths, strict=True)])
    of = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    tables = torch.arange(len(new) * BLOCKS, dtype=torch.int32).view(len(new), BLOCKS)
    return Step(
        ids,
        positions,
        torch.tensor([0, *accumulate(new)], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([end - 1 for end in accumulate(new)]),
        (GroupStep(of * BLOCKS * BLOCK + positions, tables),),
        torch.zeros(len(new), dtype=torch.int64),
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of sequences in each call of AITER's division of the work."""
    sequences: list[int] = []
    with stand_ins.installed("gfx950"):
        function = latent_attention.get_mla_metadata_v1
        found = function.found
        assert not isinstance(found, str)

        def counting(*args: object, **kwargs: object) -> object:
            sequences.append(len(args[2]))
            return found(*args, **kwargs)

        function.found = counting
        yield sequences


@contextmanager
def without_aiter(*without: Op) -> Iterator[None]:
    """These ops have no kernels of AITER."""
    registered = [list(op.kernels) for op in without]
    try:
        for op in without:
            op.kernels[:] = [kernel for kernel in op.kernels if kernel.provider != "aiter"]
        yield
    finally:
        for op, kernels in zip(without, registered, strict=True):
            op.kernels[:] = kernels


def logits(
    model: nn.Module, providers: tuple[str, ...], **chosen: Any
) -> tuple[Program, list[Tensor]]:
    """Of a step with long prompts, a mixed one, and a decode step."""
    options = {"glue": "eager", "cache": False, "strict": True, "providers": providers} | chosen
    program = compile_model(model, options, platform=HERE)
    program.bind([spec.allocate(2 * BLOCKS, BLOCK, "cpu") for spec in program.specs])
    ids = torch.randint(3, 96, (320,), generator=torch.Generator().manual_seed(0))
    steps = [([290, 5], [290, 5]), ([1, 6], [291, 11]), ([1, 1], [292, 12])]
    with torch.no_grad():
        found = [program(step(ids[: sum(new)], new, lengths)) for new, lengths in steps]
    return program, found


def test_deepseeks_steps_run_in_aiter_with_the_division_of_work_computed_once(
    model: nn.Module, counted: list[int]
) -> None:
    program, found = logits(model, ("aiter", "torch"))
    served = {(c.op, str(c.tokens)): c.chosen for c in program.report.kernels}
    assert {key: who for key, who in served.items() if key[0].startswith("mla")} == {
        ("mla_rope_kv_write", "1 to 256"): "aiter",
        ("mla_absorbed_attention", "1 to 256"): "aiter",
        ("mla_rope_kv_write", "257 and more"): "aiter",
        ("mla_paged_attention", "257 and more"): "aiter",
    }
    # Two layers, and two steps in which attention is absorbed.
    assert counted == [2, 2]
    _, expected = logits(model, ("torch",))
    for got, wanted in zip(found, expected, strict=True):
        assert sqnr(got, wanted) > 30


@pytest.mark.rotating
def test_a_cached_program_divides_the_work_once_a_step_as_well(
    tmp_path: Path, counted: list[int]
) -> None:
    cached = {"cache": True, "cache_dir": str(tmp_path)}
    _, expected = logits(built("ours"), ("aiter", "torch"), **cached)
    program, found = logits(built("ours"), ("aiter", "torch"), **cached)
    assert program.report.cached.kind == "hit"
    assert counted == [2, 2, 2, 2]
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.rotating
def test_the_indexer_and_attention_to_chosen_keys_are_both_aiters_over_fp8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(indexer, "TOPK", 256)
    more = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 256, "rope_interleave": True}
    stock = theirs_of("deepseek_v32", **KINDS["deepseek_v32"][1] | DEEPSEEK | more)
    model = wrap_stock(stock.to(torch.bfloat16)).eval()
    fp8 = {"kv_cache_dtype": "fp8"}
    with stand_ins.installed("gfx950"):
        # All of AITER's kernels, and those alone that choose keys and attend to them.
        program, of_all = logits(model, ("aiter", "torch"), **fp8)
        norms = ops.rms_norm, ops.add_rms_norm, ops.layer_norm, ops.rms_norm_pair
        with without_aiter(*norms, ops.linear, ops.silu_and_mul):
            attending, found = logits(model, ("aiter", "torch"), **fp8)
    whose = {c.op: c.chosen for c in attending.report.kernels}
    assert whose["linear"] == whose["rms_norm"] == "torch"
    served = {c.op: (str(c.tokens), c.chosen) for c in program.report.kernels}
    assert {op: who for op, who in served.items() if op.startswith(("mla", "index", "paged"))} == {
        "index_write": ("any", "aiter"),
        "paged_index_topk": ("any", "aiter"),
        "mla_rope_kv_write": ("any", "aiter"),
        "mla_absorbed_attention": ("any", "aiter"),
    }
    assert program.report.matches["index_queries"] == stock.config.num_hidden_layers
    _, expected = logits(model, ("torch",), **fp8)
    for got, all_got, wanted in zip(found, of_all, expected, strict=True):
        assert sqnr(got, wanted) > 25
        # Norms and products of AITER round elsewhere, and fp8 scores that are close change places.
        assert sqnr(all_got, wanted) > 20
