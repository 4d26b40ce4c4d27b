"""The scheduler of an engine, from its settings and what its executor has room for."""

from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.executor import Limits
from atomc.runtime.requests.request_errors import RequestErrors
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.data_parallel import DataParallelScheduler
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.snapshots import Snapshots


def create_scheduler(
    config: EngineConfig, limits: Limits, request_errors: RequestErrors
) -> Scheduler | DataParallelScheduler:
    """One for all ranks, or with data-parallel ranks one for each."""
    ranks = [_rank_scheduler(config, limits, request_errors) for _ in range(config.data_ranks)]
    return ranks[0] if len(ranks) == 1 else DataParallelScheduler(ranks, config.max_queue)


def _rank_scheduler(
    config: EngineConfig, limits: Limits, request_errors: RequestErrors
) -> Scheduler:
    size, rows = limits.capacity, limits.state_rows
    return Scheduler(
        BlockPool(
            size.num_blocks, size.block_size, limits.windows, shares=not limits.no_prefix_cache
        ),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        max_queue=config.max_queue,
        policy=config.scheduling_policy,
        request_errors=request_errors,
        state_rows=rows,
        snapshots=Snapshots(rows.first_snapshot, rows.snapshots, size.block_size)
        if rows is not None and rows.snapshots
        else None,
        lookahead=config.speculative_tokens - 1 if config.speculative == "mtp" else 0,
        images=limits.images,
        image_queue_bytes=config.image_queue_bytes,
    )
