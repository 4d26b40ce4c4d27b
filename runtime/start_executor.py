"""Starts what executes the steps of an engine: a worker in this process, or a group of ranks."""

from typing import TYPE_CHECKING

from torch import nn

from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.timings import Phases
from atomc.runtime.execution.worker import Worker
from atomc.runtime.ranks.rank_failed import FailureHandler
from atomc.runtime.ranks.rank_launcher import RankLauncher

if TYPE_CHECKING:  # needs pyzmq
    from atomc.runtime.ranks.executor import RankExecutor


def start_executor(
    config: EngineConfig,
    phases: Phases,
    *,
    module: nn.Module | None,
    spare_cores: int,
    on_rank_failure: FailureHandler | None,
    rank_launcher: RankLauncher | None,
) -> "tuple[Worker | RankExecutor, Worker]":
    """The executor, and the worker of this process; arguments as in Engine.

    Raises what Engine raises, and RuntimeError if memory runs out.
    """
    if config.num_ranks == 1:
        worker = Worker(config, phases, module=module, spare_cores=spare_cores)
        return worker, worker
    if module is not None:
        raise ValueError(
            f"the model has {config.num_ranks} ranks, but it is a module of this process, which "
            "other processes cannot build: pass a checkpoint, or run the program under torchrun "
            "and cut the module with atomc.parallelize"
        )
    try:
        from atomc.runtime.ranks.executor import RankExecutor
    except ImportError as error:
        raise ImportError(
            f"{config.num_ranks} ranks need {error.name}: pip install 'atomc[serve]'"
        ) from error
    executor = RankExecutor(
        config,
        phases,
        spare_cores=spare_cores,
        on_failure=on_rank_failure,
        launcher=rank_launcher,
    )
    return executor, executor.worker


def out_of_memory_message(config: EngineConfig, *, compiled: bool) -> str:
    """What to change after running out of memory during the start, before or after the model was
    compiled.
    """
    if not compiled:
        return (
            "out of memory while reading the weights: use a smaller model or smaller weights "
            "(dtype bfloat16, or quantization)"
        )
    sized = next(
        (name for name in ("kv_bytes", "num_blocks") if getattr(config, name) is not None),
        "gpu_memory_utilization",
    )
    return (
        f"out of memory while starting: lower {sized} (now {getattr(config, sized)}), "
        "max_num_batched_tokens, max_num_seqs or max_model_len"
    )
