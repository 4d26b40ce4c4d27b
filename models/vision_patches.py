"""Where the patches of images are, for the vision encoders of Qwen3-VL and Qwen3.5: computed on the
host from the grids of the images, so that the encoder itself is one graph for images of any size.

An encoder takes P patches of W values, of one image after another. A processor orders the patches
of an image by the blocks of merge_size x merge_size patches that become one token.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atomc.models.image_grid import Grid
from atomc.ops.inputs import PatchInputs

Array = npt.NDArray[Any]
# Frames whose patches are computed once: 64 bytes for a patch, 1 MiB for an image of 2,048 x 2,048
# pixels.
FRAMES_KEPT = 16
DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int32): torch.int32,
}


class EncodesImages:
    """What models with such an encoder have in common.

    image_token_ids  tokens that stand for a part of an image or of a video
    merge_size       a token stands for merge_size x merge_size patches
    patch_width      W
    embedding_width  E, the width of an image token's embedding: that of the model for the token
                     itself, and again for each level that adds to it
    table_side       the encoder's table of position embeddings has table_side x table_side entries
    """

    image_token_ids: frozenset[int]
    merge_size: int
    patch_width: int
    embedding_width: int
    table_side: int

    def encode_images(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The embeddings [I, E] of images with these grids, in order. pixels [P, W]."""
        return self.encode_patches(pixels, self.patch_inputs(grids, pixels.device))

    def patch_inputs(self, grids: Sequence[Grid], device: torch.device) -> PatchInputs:
        """What `encode_patches` reads besides pixels."""
        return patch_inputs(grids, self.merge_size, self.table_side, device)

    def encode_patches(self, pixels: Tensor, patches: PatchInputs) -> Tensor:
        """As encode_images, with the inputs for the grids."""
        raise NotImplementedError


def patch_inputs(
    grids: Sequence[Grid], merge_size: int, table_side: int, device: torch.device
) -> PatchInputs:
    """The inputs for images of these grids, at least one, copied to the device at once: the stream
    is not waited for.

    table_side  the table of position embeddings has table_side x table_side entries

    Raises ValueError for a grid that is not divisible into tokens.
    """
    starts, frames = [0], []
    for t, h, w in grids:
        if min(t, h, w) < 1 or h % merge_size or w % merge_size:
            raise ValueError(
                f"an image has a grid of {t} x {h} x {w} patches, expected positive numbers, and "
                f"multiples of {merge_size} for the last two"
            )
        starts += [starts[-1] + h * w * frame for frame in range(1, t + 1)]
        frames += [_frame(h, w, merge_size, table_side)] * t
    columns = [np.concatenate(arrays) for arrays in zip(*frames, strict=True)]
    *of_patches, query_start = _copy_to_device([*columns, np.array(starts, np.int32)], device)
    return PatchInputs(query_start, *of_patches)


def _copy_to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Tensors with these values, parts of one: all but the last array are of multiples of 16 bytes,
    so that each part begins at one, which kernels expect.
    """
    bounds = [0, *accumulate(array.nbytes for array in arrays)]
    host = torch.empty(bounds[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    to = host.numpy()
    for array, start, end in zip(arrays, bounds[:-1], bounds[1:], strict=True):
        to[start:end] = array.reshape(-1).view(np.uint8)
    # Pinned memory that is freed during a copy is not given out again before its end.
    memory = host.to(device, non_blocking=True)
    return [
        memory[start:end].view(DTYPES[array.dtype]).view(array.shape)
        for array, start, end in zip(arrays, bounds[:-1], bounds[1:], strict=True)
    ]


@lru_cache(maxsize=FRAMES_KEPT)
def _frame(h: int, w: int, merge_size: int, side: int) -> tuple[Array, Array, Array]:
    """Coordinates, corners and weights of the patches of one frame, which are not written again.
    In numpy, whose calls cost less than those of torch, and no threads.
    """
    blocks = np.arange(h * w).reshape(h // merge_size, merge_size, w // merge_size, merge_size)
    order = blocks.transpose(0, 2, 1, 3).reshape(-1)
    row, column = order // w, order % w
    (above, above_weights), (left, left_weights) = _neighbours(h, side), _neighbours(w, side)
    corners = above[row][:, :, None] * side + left[column][:, None, :]
    weights = above_weights[row][:, :, None] * left_weights[column][:, None, :]
    arrays = np.stack((row, column), -1), corners.reshape(-1, 4), weights.reshape(-1, 4)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _neighbours(size: int, side: int) -> tuple[Array, Array]:
    """The two entries of a table of `side` entries around each of `size` positions that are spread
    evenly over it, and their shares: [size, 2] each. With transformers' operations in fp32, so that
    results are equal bit for bit.
    """
    place = np.arange(size, dtype=np.float32) * np.float32(side - 1)
    place /= np.float32(max(size - 1, 1))
    first = np.floor(place)
    entries = first.astype(np.int64)[:, None] + np.arange(2)
    share = 1 - (place - first)
    return np.minimum(entries, side - 1), np.stack((share, 1 - share), -1)
