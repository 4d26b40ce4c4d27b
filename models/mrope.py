"""Multimodal rotary positions (M-RoPE, Wang et al. 2024, "Qwen2-VL"): each token has a temporal, a
vertical and a horizontal position.

Text counts all three up together. The tokens of an image take the coordinates of its grid, counted
from the position after the text before it; text after it goes on behind the longer side of the
grid. Frames of a video are images.

T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Number of patches: temporal, vertical, horizontal.
Grid = tuple[int, int, int]


def num_image_tokens(grid: Grid, merge_size: int) -> int:
    """The number of tokens of an image: one for merge_size x merge_size patches."""
    t, h, w = grid
    return t * (h // merge_size) * (w // merge_size)


def mrope_positions(
    images: Sequence[tuple[int, Grid]], num_tokens: int, merge_size: int
) -> tuple[Tensor, int]:
    """The positions [3, T] i64 of a prompt of num_tokens, and the number to add to the index of a
    token after the prompt for its position.

    images  index of the first token and grid of each image, in the order of the prompt

    Raises ValueError for images that overlap or exceed the prompt.
    """
    parts: list[Tensor] = []
    index = position = 0  # of the next token
    for start, grid in images:
        end = start + num_image_tokens(grid, merge_size)
        if start < index or end > num_tokens:
            raise ValueError(
                f"an image has tokens {start} to {end}, expected some of {index} to {num_tokens}: "
                "images must be in order, not overlap, and end inside the prompt"
            )
        parts.append(_text(position, start - index))
        position += start - index
        t, h, w = grid[0], grid[1] // merge_size, grid[2] // merge_size
        parts.append(torch.cartesian_prod(*map(torch.arange, (t, h, w))).T + position)
        position += max(h, w)
        index = end
    parts.append(_text(position, num_tokens - index))
    positions = torch.cat(parts, dim=1)
    # Of several temporal patches, the last may have the largest position.
    return positions, int(positions.max()) + 1 - num_tokens if num_tokens else 0


def _text(position: int, length: int) -> Tensor:
    return torch.arange(position, position + length).expand(3, -1)
