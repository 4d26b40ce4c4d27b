"""Where the patches of images are, for the vision encoders of Qwen3-VL and Qwen3.5: computed on the
host from the grids of the images, so that the encoder itself is one graph for images of any size.

An encoder takes P patches of W values, of one image after another. A processor orders the patches
of an image by the blocks of merge_size x merge_size patches that become one token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atomc.models.mrope import Grid
from atomc.ops.inputs import PatchInputs


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
        """The embeddings [I, E] of the tokens of images with these grids, in order. pixels
        [P, W].
        """
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
    """The inputs for images of these grids, at least one.

    table_side  the table of position embeddings has table_side x table_side entries

    Raises ValueError for a grid that is not divisible into tokens.
    """
    starts, parts = [0], []
    for t, h, w in grids:
        if min(t, h, w) < 1 or h % merge_size or w % merge_size:
            raise ValueError(
                f"an image has a grid of {t} x {h} x {w} patches, expected positive numbers, and "
                f"multiples of {merge_size} for the last two"
            )
        starts += [starts[-1] + h * w * frame for frame in range(1, t + 1)]
        of_frame = _frame(h, w, merge_size, table_side)
        parts.append([x.repeat(t, 1) for x in of_frame])
    query_start = torch.tensor(starts, dtype=torch.int32)
    whole = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return PatchInputs(*(x.to(device) for x in (query_start, *whole)))


def _frame(h: int, w: int, merge_size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates, corners and weights of the patches of one frame."""
    blocks = torch.arange(h * w).view(h // merge_size, merge_size, w // merge_size, merge_size)
    order = blocks.transpose(1, 2).flatten()
    row, column = order // w, order % w
    (above, above_weights), (left, left_weights) = _neighbours(h, side), _neighbours(w, side)
    corners = above[row][:, :, None] * side + left[column][:, None, :]
    weights = above_weights[row][:, :, None] * left_weights[column][:, None, :]
    return torch.stack((row, column), -1), corners.flatten(1), weights.flatten(1)


def _neighbours(size: int, side: int) -> tuple[Tensor, Tensor]:
    """The two entries of a table of `side` entries around each of `size` positions that are spread
    evenly over it, and their shares: [size, 2] each. With transformers' operations, so that results
    are equal bit for bit.
    """
    place = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    first = place.floor()
    entries = first.long()[:, None] + torch.arange(2)
    share = 1 - (place - first)
    return entries.clamp(max=side - 1), torch.stack((share, 1 - share), -1)
