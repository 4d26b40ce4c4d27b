"""Positions of images in a prompt, compared with those of transformers."""

import pytest
import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from atomc.models.image_grid import num_image_tokens
from atomc.models.mrope import mrope_positions

TEXT, IMAGE, VIDEO = 0, 1, 2
# Text, images, and videos as frames; grids are in patches, text in tokens.
PROMPTS = {
    "text": [5],
    "image": [3, (1, 4, 6), 4],
    "an image first and last": [(1, 2, 2), 2, (1, 8, 2)],
    "three images": [1, (1, 4, 4), 1, (1, 2, 12), 7, (1, 10, 6), 2],
    "an image of two temporal patches": [2, (2, 4, 6), 3],
    "an image longer in time than in space": [2, (5, 2, 2)],
    "frames of a video": [2, ("video", 3, 4, 6), 3],
    "an image between two videos": [2, ("video", 2, 4, 6), 3, (1, 6, 4), 1, ("video", 1, 2, 2), 2],
}


def transformers_positions(prompt, merge):
    """get_rope_index of this prompt, whose frames are separated by a text token each."""
    config = Qwen3VLConfig(vision_config={"spatial_merge_size": merge})
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    kinds, grids, videos = [], [], []
    for part in prompt:
        if isinstance(part, int):
            kinds += [TEXT] * part
        elif part[0] == "video":
            _, t, h, w = part
            videos.append((t, h, w))
            for _ in range(t):
                kinds += [TEXT] + [VIDEO] * (h * w // merge**2)
        else:
            grids.append(part)
            kinds += [IMAGE] * num_image_tokens(part, merge)
    positions, delta = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(grids) if grids else None,
        torch.tensor(videos) if videos else None,
    )
    return positions[:, 0], int(delta[0, 0])


def images_of(prompt, merge):
    """Start and grid of each image and frame, and the length of the prompt."""
    images, length = [], 0
    for part in prompt:
        if isinstance(part, int):
            length += part
        elif part[0] == "video":
            for _ in range(part[1]):
                grid = (1, *part[2:])
                images.append((length + 1, grid))
                length += 1 + num_image_tokens(grid, merge)
        else:
            images.append((length, part))
            length += num_image_tokens(part, merge)
    return images, length


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_positions_are_those_of_transformers(prompt, merge):
    expected, expected_delta = transformers_positions(prompt, merge)
    images, length = images_of(prompt, merge)
    positions, delta = mrope_positions(images, length, merge)
    assert torch.equal(positions, expected)
    assert delta == expected_delta


def test_a_prompt_without_tokens_has_no_positions():
    positions, delta = mrope_positions([], 0, 2)
    assert positions.shape == (3, 0)
    assert delta == 0


@pytest.mark.parametrize(
    "images", [[(3, (1, 4, 4)), (4, (1, 2, 2))], [(8, (1, 4, 4))]], ids=["overlap", "too long"]
)
def test_images_that_do_not_fit_the_prompt_are_refused(images):
    with pytest.raises(ValueError, match="images must be in order, not overlap, and end inside"):
        mrope_positions(images, 10, 2)
