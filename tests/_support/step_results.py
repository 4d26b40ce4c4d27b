"""Results for scheduled steps, in place of an executor."""

from atomc.runtime.scheduling.step import ScheduledStep


def step_results(step: ScheduledStep, token: int) -> tuple[list[list[int]], list[int]]:
    """Arguments of finish_step: this token for each chunk that samples, and each decode row."""
    parts = step.parts or (step,)
    return (
        [[token] * (chunk.num_samples > 0) for part in parts for chunk in part.chunks],
        [token] * sum(part.num_decoding for part in parts),
    )
