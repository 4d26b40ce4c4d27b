"""The plan of a pipeline: each stage is a model with its own program, and is planned as one."""

from collections.abc import Callable
from dataclasses import replace

from atomc.models.config import integer
from atomc.parallel.process_group import PipelineStage
from atomc.planning.device_model import Model
from atomc.planning.plan_report import Pipeline, StageRow, StepPlan
from atomc.platform import Platform


def plan_stages(
    count: int,
    build: Callable[[PipelineStage], Model],
    plan: Callable[[Model], StepPlan],
    platform: Platform,
) -> StepPlan:
    """The plan of the slowest of so many stages, with what each of them holds, takes and sends.

    build   the model of a stage
    plan    of this model
    """
    models = [build(PipelineStage(index, tuple(range(count)))) for index in range(count)]
    plans = [plan(model) for model in models]
    rows = [_row(*model_plan, platform) for model_plan in zip(models, plans, strict=True)]
    slowest = max(rows, key=lambda row: (row.seconds or 0, row.weights, -row.index))
    fits = [model_plan.memory.fits for model_plan in plans if model_plan.memory.fits is not None]
    return replace(
        plans[slowest.index],
        pipeline=Pipeline(rows, slowest.index, min(fits, default=None), platform.link),
    )


def _row(model: Model, plan: StepPlan, platform: Platform) -> StageRow:
    stage = model.stage
    assert stage is not None
    layers = stage.layers(integer(model.config, "num_hidden_layers"))
    sent = 0
    if not stage.is_last:
        width = integer(model.config, "hidden_size")
        sent = plan.load.tokens * width * model.dtype.itemsize
    also = [
        *(["embedding"] if stage.is_first else []),
        *(["norm and head"] if stage.is_last else []),
    ]
    return StageRow(
        stage.index,
        layers.start,
        layers.stop - 1,
        ", ".join(also),
        plan.memory.weights,
        plan.memory.per_token,
        plan.total("seconds"),
        sent,
        sent / platform.link if platform.link else None,
    )
