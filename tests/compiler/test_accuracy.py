"""Logits of compiled models against transformers: stock and ours, in fp32 and bf16, whole and step
by step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomc
from atomc.loading.loader import load
from atomc.ops import GroupStep, Step
from atomc.ops.state import groups_of
from atomc.program import Program, compile_model
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers", reason="the reference is transformers")

# On a machine with a GPU everything here runs there, as part of `make test-gpu`.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
KINDS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 6}),
}
LENGTH = 53


def per_change(*values: str, now: bool) -> Any:
    """A row of parameters; unless `now`, left to `make test-all`."""
    return pytest.param(*values, id="-".join(values), marks=() if now else pytest.mark.slow)


# Inductor takes seconds for each model, and does the same in all of them.
through_both = pytest.mark.parametrize(
    ("checkpoint", "glue"),
    [
        per_change(kind, glue, now=kind == "qwen3")
        for kind in sorted(KINDS)
        for glue in ("eager", "inductor")
    ],
    indirect=["checkpoint"],
)


# Per change, mistral stands for llama as well: it differs by its window only.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.slow if kind == "llama" else ())
        for kind in sorted(KINDS)
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk whose logits spread over several units, so that errors show."""
    config, kind, more = KINDS[request.param]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(
        getattr(transformers, config)(**TINY, **more, attn_implementation="eager")
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    path = tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def reference(path: Path, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Hugging Face eager on the bf16 weights, computing in `dtype`: ids [T] -> logits [T, V] in
    fp32.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()
    model.to(DEVICE)

    def logits(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(input_ids=ids[None], use_cache=False).logits[0].float()

    return logits


def stock(path: Path, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention
    )
    return model.eval().requires_grad_(False).to(DEVICE)


def by_backend_stock(
    path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    model = stock(path, dtype)
    compiled = torch.compile(model, backend="atom", options=options)
    return lambda ids: compiled(input_ids=ids[None], use_cache=False).logits[0].float()


def by_backend_ours(
    path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(
        load(path, dtype=dtype, device=DEVICE, progress=False), backend="atom", options=options
    )
    return lambda ids: compiled(ids, torch.arange(len(ids), device=DEVICE)).float()


class Paged:
    """A program with its caches, fed any rows of any sequences."""

    def __init__(self, program: Program, sequences: int, blocks_each: int = 8):
        self.program, self.blocks_each = program, blocks_each
        layout = program.specs[0].paging.layout
        self.block_size = 16 if layout == "paged" else 16 * blocks_each
        per_sequence = blocks_each if layout == "paged" else 1
        self.tables = (
            torch.arange(sequences * per_sequence, dtype=torch.int32)
            .view(sequences, per_sequence)
            .flip(0)
        )
        program.bind(
            [
                spec.allocate(sequences * per_sequence, self.block_size, DEVICE)
                for spec in program.specs
            ]
        )

    def __call__(self, chunks: list[tuple[int, Tensor, int]], padding: int = 0) -> list[Tensor]:
        """chunks: (sequence, its new ids, how many it had before) -> logits [len(new ids), V] of
        each, in fp32.
        """
        ids = torch.cat(
            [new.cpu() for _, new, _ in chunks] + [torch.zeros(padding, dtype=torch.int64)]
        )
        positions = [torch.arange(before, before + len(new)) for _, new, before in chunks]
        slots = [
            self.tables[s].long()[at // self.block_size] * self.block_size + at % self.block_size
            for (s, _, _), at in zip(chunks, positions, strict=True)
        ]
        counts = torch.tensor([0] + [len(new) for _, new, _ in chunks])
        groups = GroupStep(
            torch.cat([*slots, torch.full((padding,), -1)]),
            torch.stack([self.tables[s] for s, _, _ in chunks]),
        )
        num_groups = len(groups_of(self.program.specs))
        step = Step(
            ids,
            torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]),
            counts.cumsum(0).int(),
            torch.tensor([before + len(new) for _, new, before in chunks], dtype=torch.int32),
            torch.arange(len(ids) - padding),
            (groups,) * num_groups,
            torch.zeros(len(chunks), dtype=torch.int64),
        )
        groups = tuple(GroupStep(*(x.to(DEVICE) for x in group)) for group in step.groups)
        step = Step(*(x.to(DEVICE) for x in step[:5]), groups, step.state_slots.to(DEVICE))
        with torch.inference_mode():
            return list(self.program(step).float().split([len(new) for _, new, _ in chunks]))


def by_program(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """The same logits over the paged cache in four ways."""
    program = compile_model(model, options)
    whole = Paged(program, 1)([(0, ids, 0)])[0]
    paged = Paged(program, 1)
    stepwise = torch.cat([paged([(0, ids[i : i + 1], i)])[0] for i in range(len(ids))])
    paged = Paged(program, 1)
    chunked = torch.cat(
        [paged([(0, ids[a:b], a)], padding=3)[0] for a, b in ((0, 7), (7, 8), (8, len(ids)))]
    )
    # Three sequences of one prompt in different places of it, with padding rows.
    paged = Paged(program, 3)
    first = paged([(2, ids[:5], 0), (0, ids[:11], 0)], padding=2)
    second = paged([(1, ids, 0), (0, ids[11:], 11), (2, ids[5:6], 5)])
    ragged = torch.cat([first[1], second[1]])
    torch.testing.assert_close(
        second[0],
        ragged,
        rtol=0,
        atol=float(1e-4 * ragged.abs().max()) if program.dtype == torch.float32 else 0.2,
    )
    return {"whole": whole, "step by step": stepwise, "in chunks": chunked, "ragged": ragged}


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(
        0, TINY["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(1)
    ).to(DEVICE)


# Per change, tests/passes/chains/test_counts.py has mistral.
@pytest.mark.rotating
@pytest.mark.parametrize(
    "checkpoint", [per_change(kind, now=kind == "qwen3") for kind in sorted(KINDS)], indirect=True
)
@pytest.mark.parametrize(
    "compiled", [by_backend_stock, pytest.param(by_backend_ours, marks=pytest.mark.slow)]
)
def test_compiled_logits_in_fp32_are_those_of_transformers(
    checkpoint: Path, ids: Tensor, compiled: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    truth = reference(checkpoint, torch.float32)
    ours = compiled(checkpoint, torch.float32, {"glue": "eager"})
    for length in (LENGTH, 7, 1):
        expected = truth(ids[:length])
        assert (ours(ids[:length]) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.rotating
@pytest.mark.parametrize(
    "checkpoint", [per_change(kind, now=kind == "qwen3") for kind in sorted(KINDS)], indirect=True
)
def test_logits_in_fp32_through_inductor_are_those_of_transformers(
    checkpoint: Path, ids: Tensor
) -> None:
    expected = reference(checkpoint, torch.float32)(ids)
    ours = by_backend_ours(checkpoint, torch.float32, {"glue": "inductor"})(ids)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.covering
@pytest.mark.parametrize("make", ["stock", "ours"])
def test_logits_over_the_paged_cache_in_fp32_are_those_of_transformers(
    checkpoint: Path, ids: Tensor, make: str
) -> None:
    expected = reference(checkpoint, torch.float32)(ids)
    model = (
        wrap_stock(stock(checkpoint, torch.float32))
        if make == "stock"
        else load(checkpoint, dtype=torch.float32, device=DEVICE, progress=False)
    )
    for way, ours in by_program(model.requires_grad_(False), ids, {"glue": "eager"}).items():
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max(), way


def assert_as_good_as_transformers_in_bf16(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """Our error is at most 1.1 times theirs, and where the truth is clear we agree with its
    argmax.
    """
    our_error, their_error = (ours - truth).norm(), (theirs - truth).norm()
    assert our_error <= 1.1 * their_error, (
        f"{our_error / their_error:.3f} times the error of transformers"
    )
    top = truth.topk(2, -1).values
    clear = top[:, 0] - top[:, 1] > 4 * (theirs - truth).abs().max()
    assert torch.equal(ours.argmax(-1)[clear], truth.argmax(-1)[clear])


@pytest.mark.covering
@pytest.mark.parametrize("compiled", [by_backend_stock, by_backend_ours])
@through_both
def test_compiled_logits_in_bf16_are_as_good_as_those_of_transformers(
    checkpoint: Path, ids: Tensor, compiled: Callable[..., Callable[[Tensor], Tensor]], glue: str
) -> None:
    truth, theirs = (
        reference(checkpoint, torch.float32)(ids),
        reference(checkpoint, torch.bfloat16)(ids),
    )
    ours = compiled(checkpoint, torch.bfloat16, {"glue": glue})(ids)
    assert_as_good_as_transformers_in_bf16(ours, theirs, truth)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "checkpoint", [per_change(kind, now=kind == "qwen3") for kind in sorted(KINDS)], indirect=True
)
@pytest.mark.parametrize("make", ["stock", "ours"])
def test_logits_over_the_paged_cache_in_bf16_are_as_good_as_those_of_transformers(
    checkpoint: Path, ids: Tensor, make: str
) -> None:
    truth, theirs = (
        reference(checkpoint, torch.float32)(ids),
        reference(checkpoint, torch.bfloat16)(ids),
    )
    model = (
        wrap_stock(stock(checkpoint, torch.bfloat16))
        if make == "stock"
        else load(checkpoint, device=DEVICE, progress=False)
    )
    for ours in by_program(model.requires_grad_(False), ids, {"glue": "eager"}).values():
        assert_as_good_as_transformers_in_bf16(ours, theirs, truth)


@pytest.mark.rotating
@through_both
def test_every_norm_of_a_model_is_bit_equal_when_the_models_roundings_are_asked_for(
    checkpoint: Path, glue: str
) -> None:
    """The residual stream after the first norm is what attention sees: compare the norms
    themselves, one by one.
    """
    model = stock(checkpoint, torch.bfloat16)
    norms = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm")
    }
    generator = torch.Generator().manual_seed(2)

    def all_norms(inputs: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
        out = []
        for norm, x, residual in zip(norms.values(), inputs, residuals, strict=True):
            total = residual + x
            out += [norm(x), norm(total), total]
        return out

    shapes = [(3, norm.weight.shape[0]) for norm in norms.values()]
    inputs, residuals = (
        [3 * torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for shape in shapes]
        for _ in range(2)
    )
    compiled = torch.compile(all_norms, backend="atom", options={"glue": glue, "rounding": "hf"})
    for ours, theirs in zip(compiled(inputs, residuals), all_norms(inputs, residuals), strict=True):
        assert torch.equal(ours, theirs)
    assert atomc.reports()[-1].matches["add_rms_norm"] == len(norms)
