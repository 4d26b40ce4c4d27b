"""The vision encoders of transformers' classes (Qwen3-VL, Qwen3.5): their attention calls
ops.varlen_attention, and the language model takes embeddings by a mask of tokens.

The language model is entered below the model that holds both parts, which would compute positions
and place embeddings by data-dependent sizes.

P patches of W values, I tokens of images, T tokens, D model width, E = D * (1 + levels) width of an
image token's embedding, V vocabulary, R rows with logits.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.models.vision_patches import EncodesImages
from atomc.ops.inputs import PatchInputs
from atomc.stock.implementations import Implementations
from atomc.stock.model import StockModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The classes of encoders that `encode_patches` calls.
ENCODERS = frozenset(
    {
        "Qwen3VLVisionModel",
        "Qwen3VLMoeVisionModel",
        "Qwen3_5VisionModel",
        "Qwen3_5MoeVisionModel",
    }
)
# With "flash" in its name, transformers passes packed sequences whole, with their borders.
ATTENTION = "atom_flash"


def has_encoder(hf_model: "PreTrainedModel") -> bool:
    """Whether it has a vision encoder of a supported class."""
    return type(getattr(getattr(hf_model, "model", None), "visual", None)).__name__ in ENCODERS


def enter_encoder(hf_model: "PreTrainedModel") -> None:
    """Have its encoder's attention call ops.varlen_attention, and its language model add embeddings
    by a mask, in place.

    Raises ValueError if the language model adds them otherwise.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _packed_attention)
    hf_model.set_attn_implementation({"vision_config": ATTENTION})
    text = hf_model.model.language_model
    if num_levels(hf_model):
        if reason := _why_unlike(type(text)):
            raise ValueError(f"{type(hf_model).__name__}: {type(text).__name__} {reason}")
        text.__dict__["_deepstack_process"] = MethodType(_deepstack_process, text)


def num_levels(hf_model: "PreTrainedModel") -> int:
    """The number of layers of the language model after which embeddings are added again (DeepStack,
    Meng et al. 2024).
    """
    return len(getattr(hf_model.model.visual, "deepstack_visual_indexes", ()))


class StockVisionModel(StockModel, EncodesImages):
    """A model that also takes embeddings of images, and computes them."""

    def __init__(
        self,
        hf_model: "PreTrainedModel",
        implementations: Implementations,
        *,
        indexed: bool = False,
    ):
        super().__init__(hf_model, implementations, indexed=indexed)
        config, vision = hf_model.config, hf_model.config.vision_config
        self.image_token_ids = frozenset({config.image_token_id, config.video_token_id})
        self.merge_size = int(vision.spatial_merge_size)
        self.patch_width = int(
            vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        )
        self.num_levels = num_levels(hf_model)
        self.embedding_width = int(config.text_config.hidden_size) * (1 + self.num_levels)
        self.table_side = int(hf_model.model.visual.num_grid_per_side)

    def encode_patches(self, pixels: Tensor, patches: PatchInputs) -> Tensor:
        encoder = self.hf_model.model.visual
        out = encoder(
            pixels.to(encoder.dtype),
            grid_thw=None,
            interp_indices=patches.corners,
            interp_weights=patches.weights,
            position_ids=patches.coordinates,
            cu_seqlens=patches.query_start,
            max_seqlen=0,  # which would wait for the device, and nothing reads
        )
        added: Sequence[Tensor] = getattr(out, "deepstack_features", ())
        return torch.cat((out.pooler_output, *added), -1)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor | None = None,
        embeddings: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] i64 and positions [T] or [3, T] i64 -> logits [T, V], or [R, V] of the
        tokens logits_rows [R] i64. The tokens is_image [T] have the embeddings [T, E]; other rows
        of these are not read.
        """
        flat = input_ids.dim() == 1
        if flat:
            input_ids, positions = input_ids[None], positions.unsqueeze(-2)
        text = self.hf_model.model.language_model
        x_BTD: Tensor = text.get_input_embeddings()(input_ids)
        levels: dict[str, Any] = {}
        if embeddings is not None and is_image is not None:
            if flat:
                embeddings, is_image = embeddings[None], is_image[None]
            image_BTD, *added = torch.split(embeddings.to(x_BTD.dtype), x_BTD.shape[-1], -1)
            x_BTD = torch.where(is_image.unsqueeze(-1), image_BTD, x_BTD)
            if self.num_levels:
                levels = {"visual_pos_masks": is_image, "deepstack_visual_embeds": added}
        x_BTD = text(
            inputs_embeds=x_BTD, position_ids=positions, use_cache=False, **levels
        ).last_hidden_state
        if logits_rows is not None:
            x_BTD = x_BTD.index_select(-2, logits_rows)
        logits: Tensor = self.hf_model.lm_head(x_BTD)
        return logits[0] if flat else logits


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function of transformers: [1, N, P, H] each -> [1, P, N, H]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ops.varlen_attention(q, k, v, cu_seq_lens_q, scale=scaling)[None], None


def _deepstack_process(
    text: nn.Module, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor
) -> Tensor:
    """Add embeddings of images to hidden_states [B, T, D]: visual_embeds [B, T, D] where
    visual_pos_masks [B, T], or as the class does, those of images only.
    """
    if visual_embeds.dim() < hidden_states.dim():
        of_class: Callable[..., Tensor] = type(text)._deepstack_process  # type: ignore[attr-defined]
        return of_class(text, hidden_states, visual_pos_masks, visual_embeds)
    return hidden_states + visual_embeds.where(visual_pos_masks.unsqueeze(-1), 0)


def _why_unlike(cls: type[Any]) -> str:
    """Why a language model does not add embeddings as _deepstack_process does; "" if it does."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        hidden, embeds = torch.randn(2, 1, 6, 4, generator=generator)
        mask = torch.tensor([[False, True, True, False, True, False]])
        try:
            expected = cls._deepstack_process(None, hidden, mask, embeds[mask])
        except Exception as error:  # code of others
            return f"cannot be compared with a masked sum: {type(error).__name__}: {error}"
        same = torch.equal(expected, hidden + embeds.where(mask.unsqueeze(-1), 0))
    return "" if same else "adds embeddings of images otherwise than by a masked sum"
