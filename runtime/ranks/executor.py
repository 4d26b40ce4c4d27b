"""RankExecutor: the Executor of a model on several ranks."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atomc.loading.checkpoint_files import load_config
from atomc.loading.loader import check_expert_placement
from atomc.parallel import sizes
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.executor import Launched, StepResults
from atomc.runtime.execution.loading.load import config_folder, expert_placement
from atomc.runtime.execution.threads import choose
from atomc.runtime.execution.timings import Phases
from atomc.runtime.execution.worker import Worker
from atomc.runtime.ranks.local_launcher import LocalLauncher
from atomc.runtime.ranks.messages import (
    IMPORTED,
    LOADED,
    Collect,
    Control,
    ControlMethod,
    Launch,
    SampleStep,
)
from atomc.runtime.ranks.monitor import Monitor
from atomc.runtime.ranks.process_group import create_store, join
from atomc.runtime.ranks.rank_failed import FailureHandler
from atomc.runtime.ranks.rank_launcher import RankLauncher, place_of
from atomc.runtime.ranks.rank_settings import RankSettings, TorchSettings
from atomc.runtime.scheduling.stats import StepCounts, sum_of_loads
from atomc.runtime.scheduling.step import ScheduledStep

STEP_SECONDS = {"cpu": 120.0, "cuda": 8.0}


class RankExecutor:
    """A Worker in this process, rank 0, and one in each other of config.num_ranks processes.

    Each step, mask and command goes to all ranks in the same order. They build the same batch and
    sample the same tokens; results are those of rank 0. With config.pp, ranks follow each other by
    stage: those of the last one sample, and its first one reports the results to rank 0.
    Data-parallel ranks take their part of each step, and all report results. A rank that fails ends
    the group: every call then raises RankFailed.

    worker      of rank 0
    on_failure  as in Monitor
    launcher    starts the other ranks; default: as processes of this host

    Raises ValueError for a size that does not divide the model, or exceeds the number of devices,
    and for a placement of other experts than the model's.
    """

    def __init__(
        self,
        config: EngineConfig,
        phases: Phases,
        *,
        spare_cores: int,
        on_failure: FailureHandler | None,
        launcher: RankLauncher | None,
    ) -> None:
        launcher = launcher or LocalLauncher()
        size = config.num_ranks
        _check_sizes(config)
        kind = launcher.device_kind(config)
        _refuse_in_group(config)
        configs = [replace(config, device=launcher.device(kind, rank)) for rank in range(size)]
        step_seconds = config.step_timeout or STEP_SECONDS[kind]
        self._monitor = Monitor(size, step_seconds, on_failure, host=launcher.host)
        workers: list[Worker] = []  # that of rank 0, once there is one
        self._close = weakref.finalize(self, _end, self._monitor, workers)
        try:
            store = create_store(size, launcher.host)
            threads = choose(
                config.threads, spare=spare_cores, processes=config.num_processes
            ).count
            settings = [
                RankSettings(
                    rank,
                    replace(configs[rank], threads=threads),
                    store.host,
                    store.port,
                    self._monitor.commands[rank],
                    self._monitor.reports,
                    TorchSettings.current(),
                )
                for rank in range(1, size)
            ]
            self._monitor.watch(launcher.start(settings))
            self._monitor.wait_done(IMPORTED)
            device = torch.device(configs[0].device or kind)
            place = join(store, 0, device, config)
            with self._monitor.executing(LOADED):
                self.worker = Worker(configs[0], phases, spare_cores=spare_cores, place=place)
            workers.append(self.worker)
            self._monitor.wait_done(LOADED)
        except BaseException:  # Ctrl-C too: no process may remain
            self._close()
            raise
        # Without ep, each rank counts all tokens.
        self._counts_experts = config.ep and any(
            program.counts_experts for program in self.worker.programs.steps.values()
        )
        self.limits = self.worker.limits
        self.can_pool = False

    @property
    def pids(self) -> Mapping[int, int]:
        """The process of each other rank."""
        return {rank: handle.pid for rank, handle in self._monitor.handles.items()}

    @property
    def places(self) -> Mapping[int, str]:
        return {
            rank: place_of(handle.pid, handle.host)
            for rank, handle in self._monitor.handles.items()
        }

    def _control(self, method: ControlMethod) -> None:
        """Call this method of the worker in all ranks."""
        with self._monitor.sending(lambda number: Control(number, method)) as number:
            getattr(self.worker, method)()
        self._monitor.wait_done(number)

    def warm_up(self) -> None:
        self._control("warm_up")

    @property
    def max_loras(self) -> int:
        return 0  # EngineConfig refuses adapters with several ranks

    def write_adapter(self, number: int, folder: str) -> None:
        raise AssertionError("there is no place for adapters")

    def ready(self) -> None:
        self._monitor.started = True

    def launch(self, step: ScheduledStep) -> "LaunchedOnRanks":
        with self._monitor.sending(lambda number: Launch(number, step), of_step=True) as number:
            running = self.worker.launch(step)
            others = [rank for rank in self.worker.config.reporting_ranks if rank]
            return LaunchedOnRanks(self._monitor, number, running, others)

    def prepare_pooling(self) -> None:
        if self.can_pool:
            return
        self._control("prepare_pooling")
        self.can_pool = True

    def sleep(self) -> None:
        self._control("sleep")

    def wake_up(self) -> None:
        self._control("wake_up")

    def raise_failure(self) -> None:
        self._monitor.raise_failure()

    def check(self) -> bool:
        """Of rank 0: no program can reach the modules of the others."""
        self.raise_failure()
        return self.worker.check()

    def counts(self) -> StepCounts:
        """Of rank 0; tokens of experts are those of all ranks, if they divide the experts."""
        if not self._counts_experts:
            return self.worker.counts()
        with self._monitor.sending(
            lambda number: Control(number, "counts"), of_step=True
        ) as number:
            counts = self.worker.counts()
            others = self._monitor.wait_done(number)
        if (config := self.worker.config).data_ranks > 1:  # each counts what its tokens chose
            others = [done for done in others if done.rank in config.reporting_ranks]
        loads = [counts.expert_load, *(done.expert_load for done in others)]
        return replace(counts, expert_load=sum_of_loads(loads))

    def forget_counts(self) -> None:
        self._control("forget_counts")

    def close(self) -> None:
        self._close()


def _check_sizes(config: EngineConfig) -> None:
    """Raise ValueError if the model does not divide, or its experts are placed otherwise."""
    folder = config_folder(config)
    fields = load_config(folder)
    sizes.check(fields, config.tp, ep=config.ep)
    sizes.check_experts(fields, config.expert_ranks if config.data_ranks > 1 else 1)
    sizes.check_stages(fields, config.pp)
    if placement := expert_placement(config):
        drafts = config.speculative_tokens if config.speculative == "mtp" else 0
        check_expert_placement(folder, placement, config.expert_ranks, draft_layers=drafts)


def _refuse_in_group(config: EngineConfig) -> None:
    """Raise ValueError if this process is in a process group already."""
    if torch.distributed.is_initialized():
        gc.collect()  # another executor that was dropped in a reference cycle leaves its group
    if torch.distributed.is_initialized():
        raise ValueError(
            f"{config.several_ranks}, but this process has a process group of torch.distributed "
            "already: close another LLM of several ranks first; without other processes, use "
            "atomc.parallelize"
        )


def _end(monitor: Monitor, workers: Sequence[Worker]) -> None:
    """Leave the group. Before, drop the CUDA graphs: NCCL ends a group, even one that failed, only
    after the graphs with its collectives. If a rank failed, such a graph may run until the thread
    that watches has aborted its collectives.
    """
    monitor.end_watch()
    for worker in workers:
        worker.runner.drop_graphs()
    monitor.close()


@dataclass(frozen=True)
class LaunchedOnRanks:
    """A step that all ranks have launched as command `number`.

    running  in rank 0
    others   further ranks with results of the step
    """

    monitor: Monitor
    number: int
    running: Launched
    others: Sequence[int]

    def sample(self, mask: Tensor | None = None) -> None:
        content = (None, 0) if mask is None else (mask.cpu().numpy().tobytes(), len(mask))
        with self.monitor.sending(
            lambda number: SampleStep(number, self.number, *content), of_step=True
        ):
            self.running.sample(mask)

    def results(self) -> StepResults:
        with self.monitor.sending(
            lambda number: Collect(number, self.number), of_step=True
        ) as number:
            results = self.running.results()
            for done in self.monitor.wait_done(number, self.others):
                assert done.results is not None, "the command asks for results"
                results.add(done.results)
        self.monitor.collected(results)
        return results
