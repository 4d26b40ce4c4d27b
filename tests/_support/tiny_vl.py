"""Small models that read images: transformers' class, ours and the wrapped class with equal weights,
and prompts with images of different sizes.
"""

from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from atomc.loading.loader import load
from atomc.models.image_grid import num_image_tokens
from atomc.models.mrope import mrope_positions
from atomc.stock.adapter import wrap_stock

IMAGE, VIDEO = 90, 91
TEXT = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
)
VISION = dict(
    depth=4,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    patch_size=4,
    out_hidden_size=64,
    num_position_embeddings=36,
)
HYBRID = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
DEEPSTACK = {"deepstack_visual_indexes": [2, 0]}
# model_type -> what differs in the text model and in the encoder
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({}, DEEPSTACK),
    "qwen3_vl_moe": (EXPERTS, DEEPSTACK),
    "qwen3_5": (HYBRID, {}),
    "qwen3_5_moe": (HYBRID | EXPERTS, {}),
}
OURS = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")


@cache
def theirs(kind: str, dtype: torch.dtype = torch.float32, **differs: Any) -> nn.Module:
    """The transformers model, whose weights are large enough that every part shows in its
    results.
    """
    text, vision = KINDS[kind]
    config = transformers.AutoConfig.for_model(
        kind,
        text_config=TEXT | text,
        vision_config=VISION | vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **differs,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        mean = -3.0 if name.endswith("A_log") else mean
        weight.data.normal_(mean, 0.15, generator=generator)
    return model.to(dtype).eval().requires_grad_(False)


def made(whose: str, kind: str, **differs: Any) -> nn.Module:
    """Our model or the wrapped class, with the same weights."""
    with TemporaryDirectory() as folder:
        theirs(kind).save_pretrained(folder)
        if whose == "ours":
            return load(folder, mmap=False, **differs)
        cls: Any = type(theirs(kind))
        return wrap_stock(cls.from_pretrained(folder)).eval().requires_grad_(False)


@dataclass(frozen=True)
class Prompt:
    """A prompt with images of these grids, of random pixels [P, W]."""

    grids: tuple[tuple[int, int, int], ...]
    pixels: Tensor
    ids: Tensor
    positions: Tensor

    @property
    def is_image(self) -> Tensor:
        return self.ids == IMAGE

    def logits(self, model: nn.Module) -> Tensor:
        """What transformers computes for it, with positions of its own."""
        return model(
            input_ids=self.ids[None],
            pixel_values=self.pixels,
            image_grid_thw=torch.tensor(self.grids),
            mm_token_type_ids=self.is_image[None].int(),
            use_cache=False,
        ).logits[0]

    def embeddings(self, model: nn.Module) -> Tensor:
        """What transformers' encoder computes: for the tokens, then for each level."""
        found = model.get_image_features(self.pixels, torch.tensor(self.grids))
        levels = getattr(found, "deepstack_features", None) or []
        # A level of transformers 5.17's qwen3_vl_moe is not split by image.
        parts = [
            p if isinstance(p, Tensor) else torch.cat(p) for p in (found.pooler_output, *levels)
        ]
        return torch.cat(parts, -1)

    def placed(self, embeddings: Tensor) -> Tensor:
        """Embeddings [I, E] in the rows of their tokens [T, E]; other rows are NaN."""
        rows = embeddings.new_full((len(self.ids), embeddings.shape[-1]), float("nan"))
        rows[self.is_image] = embeddings
        return rows


def prompt(*grids: tuple[int, int, int], merge: int = 2, width: int = 96) -> Prompt:
    """Text before, between and behind the images."""
    generator = torch.Generator().manual_seed(len(grids))
    ids: list[int] = []
    images = []
    for grid in grids:
        ids += torch.randint(80, (3,), generator=generator).tolist()
        images.append((len(ids), grid))
        ids += [IMAGE] * num_image_tokens(grid, merge)
    ids += torch.randint(80, (4,), generator=generator).tolist()
    positions, _ = mrope_positions(images, len(ids), merge)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), width, generator=generator)
    return Prompt(grids, pixels, torch.tensor(ids), positions)


ONE = prompt((1, 6, 4))
THREE = prompt((1, 4, 4), (1, 2, 10), (1, 8, 6))
