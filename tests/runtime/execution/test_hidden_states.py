"""Hidden states of layers, as a compiled program returns them, are those of transformers."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tensor_parallel_ranks import Case, whole
from torch import Tensor, nn

from atomc.loading.loader import load
from atomc.ops.state import groups_of
from atomc.parallel.process_group import PipelineStage
from atomc.parallel.stages import StageModel, cut_stage
from atomc.program import compile_model
from atomc.runtime.execution.input_batch import InputBatch
from atomc.runtime.execution.views.hidden_states import (
    WithHiddenStates,
    eagle3_layers,
    layer_inputs,
)
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

EIGHT: dict[str, Any] = {"num_hidden_layers": 8, "num_local_experts": 4, "sliding_window": 4}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
CASES = [
    Case("llama", differs=EIGHT),
    Case("gpt_oss", differs=EIGHT),
    Case("qwen3", "stock", EIGHT),
    Case("gemma2", "stock", EIGHT),
    Case("qwen3", differs=EIGHT),
    Case("gpt_oss", "stock", EIGHT),
]
PER_CHANGE = 3


def models(case: Case, folder: Path) -> tuple[nn.Module, Any]:
    """The model of the case, and that of transformers with the same weights."""
    theirs: Any = whole(case._replace(kind="transformers"))
    if case.kind == "stock":
        return whole(case), theirs
    theirs.save_pretrained(folder)
    return load(folder, progress=False), theirs


def program_states(model: nn.Module) -> list[Tensor]:
    """All that the compiled model returns for the tokens IDS, with logits of the last one."""
    program = compile_model(model, {"strict": True, "glue": "eager", "layout": "paged"})
    groups = groups_of(program.specs)
    batch = InputBatch(rows=12, sequences=1, columns=1, block_size=16, num_groups=len(groups))
    program.bind([spec.allocate(2, 16, "cpu") for spec in program.specs])
    chunk = Chunk(
        "a", 0, tuple(IDS), 0, tuple((0, (1,)) for _ in groups), num_samples=1, num_output_rows=1
    )
    step = batch.step(batch.write(ScheduledStep((chunk,))))
    with torch.inference_mode():
        return list(program.outputs(step))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if i < PER_CHANGE else pytest.mark.slow)
        for i, case in enumerate(CASES)
    ],
)
def test_a_program_returns_the_inputs_of_the_layers_that_eagle3_reads(
    case: Case, tmp_path: Path
) -> None:
    model, theirs = models(case, tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS]), output_hidden_states=True)
    layers = eagle3_layers(model)
    assert layers == (2, 4, 5)
    logits, *states = program_states(WithHiddenStates(model, layer_inputs(model, layers)))
    torch.testing.assert_close(logits, expected.logits[0, -1:], rtol=1e-4, atol=1e-4)
    for layer, found in zip(layers, states, strict=True):
        torch.testing.assert_close(found, expected.hidden_states[layer][0], rtol=1e-4, atol=1e-4)


def test_layers_that_a_model_does_not_have_are_refused() -> None:
    model = whole(Case("llama", differs=EIGHT))
    for layer in (0, 8, -3):
        with pytest.raises(ValueError, match=f"^hidden states of layers {layer}: .* from 1 to 7$"):
            layer_inputs(model, [2, layer])


def test_a_stage_returns_the_inputs_of_its_layers() -> None:
    model = whole(Case("llama", differs=EIGHT))
    ids, rows = torch.tensor(IDS), torch.arange(len(IDS))
    names = layer_inputs(model, (4, 5, 7))
    logits, received, *states = WithHiddenStates(model, names)(ids, rows, rows)
    cut_stage(model, PipelineStage(1, (0, 1)))
    view = StageModel(WithHiddenStates(model, names[1:]))
    for found, expected in zip(view(ids, rows, received, rows), (logits, *states), strict=True):
        torch.testing.assert_close(found, expected)


def test_layers_of_other_stages_are_refused() -> None:
    model = whole(Case("llama", differs=EIGHT))
    names = layer_inputs(model, (2, 7))
    cut_stage(model, PipelineStage(1, (0, 1)))
    WithHiddenStates(model, names[1:])
    with pytest.raises(
        ValueError, match=r"^hidden states of model\.layers\.1, which another stage"
    ):
        WithHiddenStates(model, names)
