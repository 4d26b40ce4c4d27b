"""The vision encoder in a worker: embeddings of images on the device, as steps request them.

P patches of W values, I tokens of images, T rows of a step, E width of an embedding.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from atomc.encoder import EncoderProgram
from atomc.models.image_grid import num_image_tokens
from atomc.replay.cudagraphs import Pool
from atomc.runtime.execution.images.encoder_graphs import EncoderGraphs
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.slots import SlotState
from atomc.runtime.requests.request_errors import is_recoverable
from atomc.runtime.scheduling.image_limits import FLOAT_BYTES
from atomc.runtime.scheduling.step import Grid, ImagePixels, ScheduledStep

# (pixels [P, W], grids of the images) -> embeddings [I, E]
Encode = Callable[[Tensor, Sequence[Grid]], Tensor]


class ImageEncoder:
    """Encodes images, and holds their embeddings by digest.

    errors   why images that steps read could not be encoded
    graphs   the encoder by CUDA graphs, between `capture` and `drop_graphs`
    """

    def __init__(self, encode: Encode, images: ImageModel, device: torch.device) -> None:
        self.encode, self.images, self.device = encode, images, device
        self.errors: dict[bytes, BaseException] = {}
        self._embeddings: dict[bytes, Tensor] = {}
        self.graphs: EncoderGraphs | None = None

    def update(self, step: ScheduledStep) -> None:
        """Drop and encode what the step requests. Idempotent. An image that cannot be encoded is in
        `errors`; raises what is no error of an image.
        """
        for digest in (*step.dropped, *(image.digest for image in step.images)):
            self._embeddings.pop(digest, None)
            self.errors.pop(digest, None)
        if not step.images:
            return
        try:
            self._encode(step.images)
        except Exception as error:  # any code of the model
            if not is_recoverable(error):
                raise
            self._encode_alone(step.images, error)

    def capture(self, pool: Pool, budget: int) -> None:
        """From now on, capture CUDA graphs. pool, budget: as in EncoderGraphs."""
        if isinstance(self.encode, EncoderProgram) and not self.encode.why_no_graph:
            self.graphs = EncoderGraphs(self.encode, pool, budget)

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs. Further images are encoded without."""
        if self.graphs is not None:
            self.graphs.program.report.cuda_graphs.clear()
        self.graphs = None

    def clear(self) -> None:
        """Drop all embeddings."""
        self._embeddings.clear()
        self.errors.clear()

    def place(self, step: ScheduledStep, states: Sequence[SlotState], into: Tensor) -> None:
        """Copy the embeddings of the step's rows to `into` [T, E]; other rows are zero. Requests
        whose images could not be encoded fail.
        """
        into[: step.num_tokens].zero_()
        starts = accumulate([chunk.num_tokens for chunk in step.chunks], initial=0)
        for chunk, state, start in zip(step.chunks, states, starts, strict=False):
            for rows in chunk.images:
                if rows.digest in self.errors:
                    state.fail("encoding an image of its prompt", self.errors[rows.digest])
                    continue
                embeddings = self._embeddings[rows.digest][rows.first : rows.first + rows.length]
                into[start + rows.row : start + rows.row + rows.length].copy_(embeddings)

    def embeddings(self, images: Sequence[ImagePixels]) -> Tensor:
        """The embeddings [I, E] of these images, in one call of the encoder. Raises ValueError if
        it returns another shape.
        """
        with torch.no_grad():
            encode = self.graphs or self.encode
            embeddings: Tensor = encode(self._pixels(images), [image.grid for image in images])
        expected = sum(image.length for image in images), self.images.width
        if tuple(embeddings.shape) != expected:
            raise ValueError(
                f"the vision encoder returned {list(embeddings.shape)}, expected {list(expected)}"
            )
        return embeddings.to(self.images.dtype)

    def encode_largest(self, max_patches: int) -> None:
        """Encode an image of as many patches, to measure the memory that it takes."""
        merge = self.images.merge_size
        height = max(isqrt(max_patches) // merge, 1) * merge
        grid = (1, height, max(max_patches // height // merge, 1) * merge)
        length = num_image_tokens(grid, merge)
        pixels = bytes(FLOAT_BYTES * height * grid[2] * self.images.patch_width)
        self.embeddings([ImagePixels(b"", length, grid, pixels)])

    def _encode(self, images: Sequence[ImagePixels]) -> None:
        embeddings = self.embeddings(images)
        parts = torch.split(embeddings, [image.length for image in images])
        for image, part in zip(images, parts, strict=True):
            # A copy: the memory of one image is freed without that of the others.
            self._embeddings[image.digest] = part.clone() if len(images) > 1 else part

    def _encode_alone(self, images: Sequence[ImagePixels], error: BaseException) -> None:
        """Encode each image in a call of its own, after the call for all has failed."""
        if len(images) == 1:
            self.errors[images[0].digest] = error
            return
        for image in images:
            try:
                self._encode([image])
            except Exception as alone:  # any code of the model
                if not is_recoverable(alone):
                    raise
                self.errors[image.digest] = alone

    def _pixels(self, images: Sequence[ImagePixels]) -> Tensor:
        """The patches [P, W] of all images, fp32 on the device."""
        rows, width = sum(image.num_patches for image in images), self.images.patch_width
        pixels = torch.empty(rows, width, pin_memory=self.device.type == "cuda")
        start, to = 0, pixels.numpy()
        for image in images:
            end = start + image.num_patches
            to[start:end] = np.frombuffer(image.pixels, np.float32).reshape(end - start, -1)
            start = end
        return pixels.to(self.device, non_blocking=True)
