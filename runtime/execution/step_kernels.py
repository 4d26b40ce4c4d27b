"""Compiles and loads the Triton kernels of steps in parallel, while an engine starts."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atomc import kernels
from atomc.cache.fingerprint import sources_in
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.graphs import launched_shapes, shapes_for_later, step_shapes
from atomc.runtime.execution.input_batch import StepShape
from atomc.runtime.execution.output_processor import OutputProcessor
from atomc.runtime.execution.runner import Runner
from atomc.runtime.requests.sample_spec import SampleSpec
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.sampler import Sampler

LAUNCH = "atomc.kernels.triton.launch"


class StepKernels:
    """The kernels of one engine start. Call `end` after the start, also if it failed.

    kernels_loaded  all kernels are compiled, and those of the first captures loaded: a step may be
                    captured without a warm-up run
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kernels_loaded = False
        self._helper: Any = None  # a process that compiles kernels

    def begin(self, module: nn.Module, vocab_size: int | None) -> None:
        """Start a helper process that compiles the sampling kernels during tracing, if they are not
        in Triton's cache.
        """
        # An error here is raised again, with its reason, when the kernels are launched.
        with suppress(Exception):
            weight = next(module.parameters())
            if weight.is_cuda:
                of = self.config
                self._helper = kernels.load_module(f"{LAUNCH}.compile_worker").start_worker(
                    f"{type(module)} {of.model} {of.dtype} {of.quantization} {of.options}"
                )
                if self._helper is not None and vocab_size is not None:
                    with self._helper.submitting(only=True):
                        _sample_with_and_without_filters(
                            Sampler(weight.device, 1), weight.new_zeros(1, vocab_size)
                        )

    def load(self, runner: Runner, outputs: OutputProcessor | None, max_num_seqs: int) -> None:
        """Compile and load all kernels that steps of this runner may need. outputs: None if it
        gives no logits.
        """
        if runner.program.device.type != "cuda" or runner.program.syncing:
            return
        from atomc.kernels.triton.launch.parallel_compile import KernelList, compile_in_parallel

        helper, self._helper = self._helper, None
        at = runner.input_batch
        sizes = (max_num_seqs, at.rows, at.columns, self.config.speculative_tokens)
        rewinds = not all(spec.can_roll_back for spec in runner.program.specs)
        shapes = launched_shapes(*sizes, rewinds=rewinds)
        keys = [program.key for program in runner.programs.all]
        sampling = sources_in("runtime/sampling")
        listed = KernelList(f"{keys} {sampling} {shapes} {outputs is None}")
        # Several ranks capture all at once, with kernels that are loaded.
        is_warm = self.config.num_ranks == 1 and None not in keys and listed.is_cached()
        if is_warm:  # the other steps load their kernels when they are captured, or first run
            later = shapes_for_later(step_shapes(*sizes, rewinds=rewinds))
            shapes = [shape for shape in shapes if shape not in later]
        folders = compile_in_parallel(partial(_launch_all, runner, outputs, shapes), worker=helper)
        if folders and not is_warm:
            listed.write(folders)
        # Loading during a capture is not tested on HIP.
        self.kernels_loaded = folders is not None and torch.version.hip is None

    def end(self) -> None:
        if self._helper is not None:
            self._helper.end()


def _launch_all(
    runner: Runner, outputs: OutputProcessor | None, shapes: Sequence[StepShape]
) -> None:
    for shape in shapes:
        logits = runner.empty_step(shape)
        if outputs is not None and shape.rows == runner.input_batch.rows:
            _sample_with_and_without_filters(outputs.sampler, outputs.whole(logits))


def _sample_with_and_without_filters(sampler: Sampler, logits: Tensor) -> None:
    """Two kernels: one filters by top_k and top_p, one does not."""
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        sampler(logits, [SampleSpec(params)] * len(logits))
