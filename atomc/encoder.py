"""A model's vision encoder, compiled for the runtime: one graph for any number and size of images,
called without Dynamo's guards.

P patches of W values, I tokens of images, E width of an image token's embedding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from atomc.cache.compiled import weight_inputs
from atomc.cache.model_cache import CompiledModel
from atomc.files.json_types import JSONMapping
from atomc.ops.inputs import PatchInputs
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import load_or_trace
from atomc.replay.cudagraphs import why_syncing
from atomc.report.page_file import publish
from atomc.torch_compat.core import Input
from atomc.weights.freed import with_freed_parameters

# Number of patches of an image: temporal, vertical, horizontal.
Grid = tuple[int, int, int]
# The images that are traced. Their numbers of frames and patches differ from all other sizes.
EXAMPLE: Sequence[Grid] = [(2, 4, 6), (3, 2, 10)]


class VisionModel(Protocol):
    """What a module has for `compile_encoder`."""

    patch_width: int

    def patch_inputs(self, grids: Sequence[Grid], device: torch.device) -> PatchInputs:
        """The inputs for images of these grids, at least one."""
        ...

    def encode_patches(self, pixels: Tensor, patches: PatchInputs) -> Tensor:
        """The embeddings [I, E] of patches with these pixels [P, W]."""
        ...


class EncoderProgram:
    """model.encode_images as one callable: pixels [P, W] and grids -> embeddings [I, E].

    report  the report of the compiler
    """

    def __init__(self, model: VisionModel, loaded: CompiledModel, *, owned: bool):
        self.report, compiled = loaded.report, loaded.compiled
        self._model, self._call = model, compiled.call
        self._inputs: list[Input] = list(loaded.inputs)
        self._arguments = [
            (i, *argument) for i, argument in enumerate(loaded.arguments) if argument is not None
        ]
        weights = weight_inputs(compiled, self.report.notes)
        make = weights.materialize_and_free if owned else weights.materialize
        self._made = make(self._inputs)
        self._refresh = None if owned else weights.refresh
        self._syncing = tuple(dict.fromkeys(compiled.syncing))

    @property
    def why_no_graph(self) -> str:
        """Why `encode_patches` cannot be captured in a CUDA graph; empty if it can."""
        if self._refresh is not None:
            return "weights may be written by the caller"
        return why_syncing(self._syncing) if self._syncing else ""

    def __call__(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The embeddings of the tokens of images with these grids, in order."""
        return self.encode_patches(pixels, self.patch_inputs(grids, pixels.device))

    def patch_inputs(self, grids: Sequence[Grid], device: torch.device) -> PatchInputs:
        """What `encode_patches` reads besides pixels."""
        return self._model.patch_inputs(grids, device)

    def encode_patches(self, pixels: Tensor, patches: PatchInputs) -> Tensor:
        """The embeddings of patches with these pixels."""
        tensors = dict(zip(NAMES, (pixels, *patches), strict=True))
        inputs = list(self._inputs)
        for i, name, dim in self._arguments:
            inputs[i] = tensors[name] if dim is None else tensors[name].shape[dim]
        if self._refresh is not None:  # a user may have written weights
            self._made = self._refresh(inputs)
        outputs = self._call(*inputs, *self._made)
        embeddings = outputs[0] if isinstance(outputs, list | tuple) else outputs
        assert isinstance(embeddings, Tensor)
        return embeddings


# In the key of the cache.
TAKES = "patches of images"
# The arguments of the function that is traced.
NAMES = ("pixels", *PatchInputs._fields)


@with_freed_parameters
def compile_encoder(
    model: nn.Module,
    options: JSONMapping | Options | None = None,
    platform: Platform | None = None,
    *,
    owned: bool = False,
) -> EncoderProgram:
    """Compile the vision encoder of a model (VisionModel) for the runtime, or load it from the
    cache.

    owned   no other code reads, writes or moves the weights: they are not checked in each call, and
            those that kernels read only as prepared weights are freed

    Raises OptionsError for wrong options, and ValueError with the reason and the line for an
    encoder that cannot be compiled. ATOMC_STRICT adds the traceback, else it is logged at level
    debug.
    """
    parsed = Options.of(options)
    trace = partial(_trace, model, parsed, owned=owned)
    loaded = load_or_trace(model, parsed, platform, TAKES, trace, owned=owned, observed=False)
    with torch.no_grad():
        program = EncoderProgram(model, loaded, owned=owned)  # type: ignore[arg-type]
    publish(loaded.report, parsed)
    return program


def _trace(model: nn.Module, options: Options, platform: Platform, *, owned: bool) -> CompiledModel:
    from atomc.compiler.trace_model import trace  # and with it Dynamo
    from atomc.rewriting.graph_pass import Context

    encoder: VisionModel = model  # type: ignore[assignment]

    def encode(
        pixels: Tensor,
        query_start: Tensor,
        coordinates: Tensor,
        corners: Tensor,
        weights: Tensor,
    ) -> Tensor:
        patches = PatchInputs(query_start, coordinates, corners, weights)
        return encoder.encode_patches(pixels, patches)

    device = next(model.parameters()).device
    num_patches = sum(t * h * w for t, h, w in EXAMPLE)
    example = (
        torch.zeros(num_patches, encoder.patch_width, device=device),
        # Of memory of their own: the sizes of parts of one tensor would depend on each other.
        *(each.clone() for each in encoder.patch_inputs(EXAMPLE, device)),
    )
    keep_texts = options.report is not None
    context = Context(options, platform, paged=True, owned=owned, keep_texts=keep_texts)
    return trace(model, encode, example, context)
