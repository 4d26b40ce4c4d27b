"""Multimodal rotary positions (M-RoPE, Wang et al. 2024, "Qwen2-VL"): each token has a temporal, a
vertical and a horizontal position.

Text counts all three up together. The tokens of an image take the coordinates of its grid, counted
from the position after the text before it; text after it goes on behind the longer side of the
grid. Frames of a video are images.

T tokens, D model width, H head width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from atomc.files.json_types import JSONMapping
from atomc.models.config import model_type
from atomc.models.image_grid import Grid, num_image_tokens
from atomc.models.rotary import Rope, Rotary


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


def mrope_section(
    hf: JSONMapping, rope: Rope, default: tuple[int, int, int]
) -> tuple[int, int, int]:
    """How many columns turn by the temporal, vertical and horizontal position.

    Raises ValueError if rope_parameters has something else than three numbers.
    """
    stored = rope.get("mrope_section") or list(default)
    numbers = (
        [n for n in stored if isinstance(n, int) and n >= 0] if isinstance(stored, list) else []
    )
    if not isinstance(stored, list) or not len(stored) == len(numbers) == 3:
        raise ValueError(
            f"{model_type(hf)}: mrope_section {stored!r:.40} is not a list of three numbers such "
            f"as {list(default)}"
        )
    temporal, vertical, horizontal = numbers
    return temporal, vertical, horizontal


class MRotary(Rotary):
    """The cos and sin tables of positions of which columns read different ones, interleaved: column
    1 of each three reads the vertical position, column 2 the horizontal one, as long as their
    sections have columns, and all others the temporal one.
    """

    axes: Tensor

    def __init__(self, rope: Rope, head_dim: int, section: tuple[int, int, int]):
        super().__init__(rope, head_dim)
        self.section = section
        self.axes = nn.Buffer(self.axis_of_column(torch.get_default_device()), persistent=False)

    def axis_of_column(self, device: torch.device) -> Tensor:
        """[H/2] i64; without values on meta."""
        if device.type == "meta":
            return torch.empty(self.head_dim // 2, dtype=torch.int64, device=device)
        axes = torch.zeros(self.head_dim // 2, dtype=torch.int64, device="cpu")
        for axis in (1, 2):
            axes[axis : 3 * self.section[axis] : 3] = axis
        return axes.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MRotary":
        super()._apply(fn, recurse)
        self.axes = self.axis_of_column(self.inv_freq.device)
        return self

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., T, D] and positions [3, ..., T], or [..., T] of text -> cos and sin
        [..., T, 1, H] in x.dtype.
        """
        if positions.dim() < x.dim():
            return super().forward(x, positions)
        of_columns = positions.index_select(0, self.axes).movedim(0, -1)
        return self.tables(of_columns.float() * self.inv_freq, x.dtype)
