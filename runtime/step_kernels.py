"""The Triton kernels that steps need: compiled and loaded, many at once, while an engine starts."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atomc import kernels
from atomc.runtime.config import EngineConfig
from atomc.runtime.graphs import launched_shapes
from atomc.runtime.runner import Runner
from atomc.runtime.sampling.sample_spec import SampleSpec
from atomc.runtime.sampling.sampler import Sampler
from atomc.runtime.sampling.sampling_params import SamplingParams


class StepKernels:
    """Those of one start. `end` is called after it, whether it failed or not.

    met  all are loaded: a step may be captured without having run
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.met = False
        self._helper: Any = None  # compiles beside this process

    def begin(self, module: nn.Module, vocab_size: int | None) -> None:
        """Where kernels are not in Triton's cache: a helper gets ready beside the tracing, and
        compiles those that draw.
        """
        # What fails here, fails with its reason where kernels are launched.
        with suppress(Exception):
            weight = next(module.parameters())
            if weight.is_cuda and kernels.load("triton") is None:
                from atomc.kernels.triton.compile_worker import start_worker

                of = self.config
                self._helper = start_worker(
                    f"{type(module)} {of.model} {of.dtype} {of.quantization} {of.options}"
                )
                if self._helper is not None and vocab_size is not None:
                    with self._helper.submitting(only=True):
                        _draw_both_ways(Sampler(weight.device, 1), weight.new_zeros(1, vocab_size))

    def meet(self, runner: Runner, sampler: Sampler, max_num_seqs: int) -> None:
        """Compile and load each kernel that a step of this runner may need."""
        if runner.program.device.type != "cuda" or runner.program.syncing:
            return
        from atomc.kernels.triton.parallel_compile import compile_in_parallel

        helper, self._helper = self._helper, None
        met = compile_in_parallel(
            partial(self._launch_all, runner, sampler, max_num_seqs), worker=helper
        )
        self.met = (
            met and torch.version.hip is None
        )  # what HIP may load during a capture was not tried

    def end(self) -> None:
        if self._helper is not None:
            self._helper.end()

    def _launch_all(self, runner: Runner, sampler: Sampler, max_num_seqs: int) -> None:
        at = runner.staging
        for shape in launched_shapes(
            max_num_seqs, at.rows, at.columns, self.config.speculative_tokens
        ):
            logits = runner.empty_step(shape)
            if shape.rows == at.rows:
                _draw_both_ways(sampler, logits)


def _draw_both_ways(sampler: Sampler, logits: Tensor) -> None:
    """With filters and without, which are two kernels."""
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        sampler(logits, [SampleSpec(params)] * len(logits))
