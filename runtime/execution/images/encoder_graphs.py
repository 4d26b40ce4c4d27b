"""CUDA graphs of the vision encoder, one for the grids of a call, captured while requests run.

A graph saves the launches of an encoder: they take longer than its work on small images.
P patches of W values, I tokens, E width of an embedding.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.encoder import EncoderProgram, Grid
from atomc.errors import first_line
from atomc.ops.inputs import PatchInputs
from atomc.replay.cudagraphs import CapturedCall, Pool
from atomc.runtime.processes.garbage_collection import gc_disabled

# With more patches, an encoder takes longer on the device than its launches on the host:
# Qwen3-VL-2B takes 12.6 ms on an H100 for 4,096 patches, in 330 launches.
MOST_PATCHES = 4096
MOST_GRAPHS = 8
# Calls of which the grids are known, and after which an unused graph may be replaced.
CALLS_KNOWN = 64
Grids = tuple[Grid, ...]


@dataclass
class _Graph:
    """patches: what the graph reads, besides pixels and weights."""

    captured: CapturedCall[Tensor]
    patches: PatchInputs
    last_call: int


class EncoderGraphs:
    """An encoder program, by a CUDA graph for grids that came twice within CALLS_KNOWN calls.

    pool    of the runner, whose graphs never run at the same time as those of the encoder
    budget  maximum bytes of the pool and of the pixels that graphs read
    """

    def __init__(self, program: EncoderProgram, pool: Pool, budget: int) -> None:
        self.program, self.pool, self.budget = program, pool, budget
        self.captured: OrderedDict[Grids, _Graph] = OrderedDict()  # the one used last is the last
        self.why_not = program.why_no_graph
        self._seen: OrderedDict[Grids, None] = OrderedDict()
        self._calls = 0
        self._pixels: Tensor | None = None  # [MOST_PATCHES, W], of all graphs

    def __call__(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The embeddings [I, E] of images with these grids, in order, from pixels [P, W]."""
        key = tuple(grids)
        self._calls += 1
        graph = self.captured.get(key)
        if graph is not None and self._pixels is not None:
            graph.last_call = self._calls
            self.captured.move_to_end(key)
            self._pixels[: len(pixels)].copy_(pixels)
            return graph.captured.replay().clone()
        embeddings = self.program(pixels, grids)
        if self._came_before(key) and self._has_room(pixels):
            self._capture(key, pixels)
        return embeddings

    def _came_before(self, key: Grids) -> bool:
        came_before = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > CALLS_KNOWN:
            self._seen.popitem(last=False)
        return came_before

    def _has_room(self, pixels: Tensor) -> bool:
        """Whether there may be another graph. Drops one that was not used for long."""
        if self.why_not or len(pixels) > MOST_PATCHES:
            return False
        size = MOST_PATCHES * pixels.shape[1] * pixels.element_size()
        if self.pool.bytes + size > self.budget:
            return False
        if len(self.captured) < MOST_GRAPHS:
            return True
        oldest = next(iter(self.captured))
        if self._calls - self.captured[oldest].last_call < CALLS_KNOWN:
            return False
        del self.captured[oldest]
        return True

    def _capture(self, key: Grids, pixels: Tensor) -> None:
        """Capture the call that has just run, so that its kernels are loaded."""
        notes, graphs = self.program.report.notes, self.program.report.cuda_graphs
        try:
            if self._pixels is None:
                self._pixels = pixels.new_zeros(MOST_PATCHES, pixels.shape[1])
            inputs = self._pixels[: len(pixels)]
            patches = self.program.patch_inputs(key, pixels.device)
            with gc_disabled(), torch.no_grad():
                captured = self.pool.capture(
                    lambda: self.program.encode_patches(inputs, patches), warm_up=False
                )
        except RuntimeError as error:  # out of memory, or what cannot be captured
            self.why_not = first_line(error) or type(error).__name__
            notes.append(f"no CUDA graph of the vision encoder: {self.why_not}")
            return
        self.captured[key] = _Graph(captured, patches, self._calls)
        graphs.append({"inputs": [list(inputs.shape)], "bytes": captured.bytes})
