"""The grid of an image's patches, and how many tokens stand for it."""

# Number of patches: temporal, vertical, horizontal.
Grid = tuple[int, int, int]


def num_image_tokens(grid: Grid, merge_size: int) -> int:
    """The number of tokens of an image: one for merge_size x merge_size patches."""
    t, h, w = grid
    return t * (h // merge_size) * (w // merge_size)
