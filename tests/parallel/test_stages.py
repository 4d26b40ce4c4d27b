"""A model that is cut into stages: each has its layers, and one after the other they give the logits
of the whole. What several processes do with them is in test_pipeline.py.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tensor_parallel_ranks import IDS, POSITIONS, TINY, fill
from test_ranks_models import EXPERTS, LATENT
from torch import nn

from atomc.loading import loader
from atomc.loading.loader import load
from atomc.parallel import sizes
from atomc.parallel.division import Division
from atomc.parallel.process_group import PipelineStage, Place
from atomc.parallel.stages import StageModel, cut_stage
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.block_groups import BlockGroups
from atomc.runtime.execution.capacity import Capacity
from atomc.runtime.execution.pipeline import micro_batches
from atomc.runtime.scheduling.step import Chunk, DecodeRows, ScheduledStep
from atomc.stock.adapter import wrap_stock

SLOW = pytest.mark.slow
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Model type, what differs, number of stages.
MODELS = {
    "ours, a tied embedding, an uneven cut": ("llama", {"tie_word_embeddings": True}, 3),
    "ours, experts": ("qwen3_moe", EXPERTS, 2),
    "ours, latent attention": ("deepseek_v3", LATENT, 4),
    "ours, sinks and windows": ("gpt_oss", {"num_local_experts": 4, **WINDOWS}, 2),
    "stock, norms behind layers": ("olmo2", {}, 2),
    "stock, scaled embeddings and logits": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
        2,
    ),
    "stock, windows and capped logits": ("gemma2", WINDOWS, 3),
}
PER_CHANGE = ("ours, a tied", "stock, scaled", "stock, windows")


def checkpoint(path: Path, model_type: str, differs: dict[str, Any], layers: int = 4) -> None:
    differs = TINY | {"num_hidden_layers": layers} | differs
    config = transformers.AutoConfig.for_model(model_type, **differs)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.save_pretrained(path)


def stages(count: int) -> list[PipelineStage]:
    return [PipelineStage(index, tuple(range(count))) for index in range(count)]


def one_after_the_other(models: list[nn.Module]) -> torch.Tensor:
    rows, states = torch.tensor([2, 6]), None
    with torch.inference_mode():
        for model in models:
            hidden = [] if states is None else [states]
            states = StageModel(model)(IDS, POSITIONS, *hidden, rows)
    return states


@pytest.mark.parametrize(
    ("model_type", "differs", "count"),
    [
        pytest.param(*row, id=name, marks=() if name.startswith(PER_CHANGE) else SLOW)
        for name, row in MODELS.items()
    ],
)
def test_stages_read_their_layers_and_give_the_logits_of_the_whole(
    model_type: str,
    differs: dict[str, Any],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint(tmp_path, model_type, differs)
    plans, execute = [], loader.execute
    monkeypatch.setattr(
        loader, "execute", lambda plan, *others: plans.append(plan) or execute(plan, *others)
    )
    whole = load(tmp_path, progress=False)
    plans.clear()
    parts = [
        load(tmp_path, progress=False, division=Division(Place(stage=stage)))
        for stage in stages(count)
    ]
    with torch.inference_mode():
        expected = whole(IDS, POSITIONS, torch.tensor([2, 6]))
    torch.testing.assert_close(one_after_the_other(parts), expected)

    read = [{entry.stored.name for entry in (*plan.fills, *plan.copies)} for plan in plans]
    stored = json.loads((tmp_path / "config.json").read_text())
    in_both = {"model.embed_tokens.weight"} if stored.get("tie_word_embeddings") else set()
    assert read[0] & read[-1] == in_both
    assert sum(map(len, read)) == len(set.union(*read)) + len(in_both)
    for part in parts:
        layers = sum("layers" in name for name, _ in part.named_parameters())
        assert 0 < layers < sum("layers" in name for name, _ in whole.named_parameters())


@SLOW
def test_a_class_whose_names_transformers_converts_is_cut_when_it_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gpt_neox", {"num_key_value_heads": 4})
    parts = [
        load(tmp_path, progress=False, division=Division(Place(stage=stage))) for stage in stages(2)
    ]
    with torch.inference_mode():
        expected = load(tmp_path, progress=False)(IDS, POSITIONS, torch.tensor([2, 6]))
    torch.testing.assert_close(one_after_the_other(parts), expected)


def test_random_weights_of_stages_are_those_of_the_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama", {"tie_word_embeddings": True})
    whole = load(tmp_path, progress=False, load_format="dummy")
    parts = [
        load(tmp_path, progress=False, load_format="dummy", division=Division(Place(stage=stage)))
        for stage in stages(3)
    ]
    with torch.inference_mode():
        expected = whole(IDS, POSITIONS, torch.tensor([2, 6]))
    assert torch.equal(one_after_the_other(parts), expected)


def test_layers_are_divided_evenly_and_the_first_stages_have_one_more() -> None:
    found = [list(stage.layers(8)) for stage in stages(3)]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_too_many_stages_are_refused_with_the_most_that_work() -> None:
    with pytest.raises(ValueError, match=r"^3 layers do not give 4 stages one each; at most 3 do$"):
        sizes.check_stages({"text_config": {"num_hidden_layers": 3}}, 4)
    sizes.check_stages({"num_hidden_layers": 4}, 4)


def test_models_whose_layers_are_not_stages_are_refused(tmp_path: Path) -> None:
    [first, _] = stages(2)
    opt = transformers.AutoConfig.for_model(
        "opt", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=96
    )
    model = wrap_stock(transformers.AutoModelForCausalLM.from_config(opt))
    with pytest.raises(ValueError, match=r"^OPTForCausalLM does not say .* pp cannot cut it$"):
        cut_stage(model, first)
    checkpoint(tmp_path, "llama", {}, layers=1)
    with pytest.raises(ValueError, match=r"^1 layers do not give 2 stages one each$"):
        cut_stage(load(tmp_path, progress=False), first)


def test_settings_that_stages_do_not_support_are_refused() -> None:
    message = "^pp is not supported with expert_load, which counts the experts of one process"
    with pytest.raises(ValueError, match=message):
        EngineConfig(pp=2, expert_load=True)


def chunks(rng: random.Random) -> tuple[Chunk, ...]:
    found = []
    for slot in range(rng.randint(0, 6)):
        length = rng.randint(1, 40)
        outputs = rng.choice([0, 1, length])
        found.append(
            Chunk(
                str(slot),
                slot,
                tuple(rng.choices(range(90), k=length)),
                start=rng.randint(0, 50),
                blocks=((3, (slot, slot + 1)), (0, ())),
                num_output_rows=outputs,
                num_samples=min(outputs, 1),
            )
        )
    return tuple(found)


def rows(chunk: Chunk) -> list[tuple[int, int, int, bool]]:
    """Slot, position, token and whether there is an output, of each row."""
    first = chunk.num_tokens - chunk.num_output_rows
    return [
        (chunk.slot, chunk.start + i, token, i >= first) for i, token in enumerate(chunk.tokens)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_have_the_rows_of_the_step_in_order(seed: int) -> None:
    rng = random.Random(seed)
    slots = tuple(range(10, 10 + rng.randint(1, 30)))
    decoding = DecodeRows(slots, tuple(rng.choices(range(50), k=len(slots))), ((11, ((4, (7,)),)),))
    step = ScheduledStep(chunks(rng), released=(9,), decoding=decoding)
    parts = micro_batches(step, 8, least_rows=8)
    assert len(parts) == max(1, min(8, step.num_tokens // 8)) or step.num_tokens % len(parts)
    assert max(part.num_tokens for part in parts) <= -(-step.num_tokens // len(parts)) + 1
    assert parts[0].decoding.blocks == decoding.blocks
    assert all(part.decoding.blocks == () and part.num_tokens for part in parts[1:])
    assert [slot for part in parts for slot in part.decoding.slots] == [*slots]
    assert tuple(start for part in parts for start in part.decoding.starts) == decoding.starts
    behind = [part for part in parts if part.num_decoding]
    assert not any(part.chunks for part in behind[1:])  # rows come after all chunks
    pieces = [chunk for part in parts for chunk in part.chunks]
    assert all(piece.num_tokens for piece in pieces)
    assert [row for piece in pieces for row in rows(piece)] == [
        row for chunk in step.chunks for row in rows(chunk)
    ]
    for chunk in step.chunks:
        first, *others = [piece for piece in pieces if piece.slot == chunk.slot]
        assert first.blocks == chunk.blocks
        assert all(piece.blocks == ((0, ()), (0, ())) for piece in others)
        assert [first, *others][-1].num_samples == chunk.num_samples


def test_a_small_step_is_one_micro_batch() -> None:
    step = ScheduledStep((Chunk("a", 0, (1,) * 15, 0, ((0, (1,)),), num_output_rows=1),))
    assert micro_batches(step, 8, least_rows=8) == [step]


def test_a_stage_reads_the_blocks_of_its_own_groups() -> None:
    groups = BlockGroups((0, 8, 16), (2, 0))
    size = groups.whole(Capacity((5, 7), 16, 100))
    assert size.num_blocks[0] == 7 and size.num_blocks[2] == 5 and size.num_blocks[1] > 2**60
    assert groups.own_blocks(Capacity((4, 6, 3), 16, 100)) == (3, 4)
    blocks = ((0, (1,)), (0, (2,)), (0, (3,)))
    decoding = DecodeRows((5,), (16,), ((5, blocks),))
    step = ScheduledStep((Chunk("a", 0, (1,), 0, blocks),), decoding=decoding)
    own = groups.own_part(step)
    assert own.chunks[0].blocks == ((0, (3,)), (0, (1,)))
    assert own.decoding == decoding._replace(blocks=((5, ((0, (3,)), (0, (1,)))),))
    assert BlockGroups((0, 8), (0, 1)).own_part(step) is step
