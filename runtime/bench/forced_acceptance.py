"""Accepts drafts whatever the model computes, to measure speculation on random weights or text."""

import logging
from typing import TYPE_CHECKING

from atomc.runtime.config import EngineConfig

if TYPE_CHECKING:  # imports torch
    from atomc.runtime.engine import Engine

log = logging.getLogger("atomc")


def check_acceptance(config: EngineConfig, average: float) -> None:
    """Raise ValueError unless steps with drafts can yield so many tokens."""
    if config.speculative != "mtp":
        raise ValueError("speculative_accept needs drafts in every step: set speculative to 'mtp'")
    most = 1 + config.speculative_tokens
    if not 1 <= average <= most:
        raise ValueError(
            f"speculative_accept is {average}, a step of {config.speculative_tokens} draft tokens "
            f"yields 1 to {most} tokens"
        )


def force_acceptance(engine: "Engine", average: float) -> None:
    """Let each step with a complete draft yield so many tokens on average, from now on; a note in
    the report says that the output is not that of the model. Raises as `check_acceptance`.
    """
    from atomc.runtime.scheduling.scheduler import Scheduler
    from atomc.runtime.scheduling.speculative import ForcedAcceptance

    check_acceptance(engine.config, average)
    assert isinstance(engine.scheduler, Scheduler), "data-parallel ranks have no draft layer"
    engine.scheduler.chunks.forced = ForcedAcceptance(average)
    note = (
        f"speculative_accept is {average}: drafts are accepted whether they are right or not, and "
        "the output is NOT that of the model"
    )
    engine.program.report.notes.append(note)
    log.warning("%s", note)
