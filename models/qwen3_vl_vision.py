"""The vision encoder of Qwen3-VL and Qwen3.5 (Bai et al. 2025): a transformer over the patches of
images, each of which sees the patches of its frame; blocks of patches become tokens at its end.

P patches of W values, I tokens, C width of the encoder, N heads, H head width, E width of a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import integer, model_type, number, only
from atomc.models.rotary import Rope, Rotary, apply_rope
from atomc.ops.inputs import PatchInputs

EPS = 1e-6


@dataclass(frozen=True)
class VisionConfig:
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    table_side: int
    rope_theta: float
    deepstack_visual_indexes: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: JSONMapping, deepstack: tuple[int, ...] | None) -> "VisionConfig":
        """deepstack: deepstack_visual_indexes of a config without the field; None: there are none.

        Raises ValueError for an unsupported value.
        """
        only(hf, "hidden_act", "gelu_pytorch_tanh")
        rope = hf.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        only(rope, "rope_type", "axial", "default")
        config = cls(
            depth=integer(hf, "depth", 27),
            hidden_size=integer(hf, "hidden_size", 1152),
            intermediate_size=integer(hf, "intermediate_size", 4304),
            num_heads=integer(hf, "num_heads", 16),
            in_channels=integer(hf, "in_channels", 3),
            patch_size=integer(hf, "patch_size", 16),
            temporal_patch_size=integer(hf, "temporal_patch_size", 2),
            spatial_merge_size=integer(hf, "spatial_merge_size", 2),
            out_hidden_size=integer(hf, "out_hidden_size", 3584),
            table_side=int(integer(hf, "num_position_embeddings", 2304) ** 0.5),
            rope_theta=number(rope, "rope_theta", 10000.0),
            deepstack_visual_indexes=() if deepstack is None else _levels(hf, deepstack),
        )
        if config.hidden_size % config.num_heads or config.head_dim % 4:
            raise ValueError(
                f"{model_type(hf)}: hidden_size {config.hidden_size} is not num_heads "
                f"{config.num_heads} times a multiple of 4, which rotary positions of two axes need"
            )
        if any(level >= config.depth for level in config.deepstack_visual_indexes):
            raise ValueError(
                f"{model_type(hf)}: deepstack_visual_indexes "
                f"{list(config.deepstack_visual_indexes)} exceed the depth of {config.depth}"
            )
        return config

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """W."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


def _levels(hf: JSONMapping, default: tuple[int, ...]) -> tuple[int, ...]:
    stored = hf.get("deepstack_visual_indexes")
    stored = list(default) if stored is None else stored
    levels = (
        [i for i in stored if isinstance(i, int) and i >= 0] if isinstance(stored, list) else []
    )
    if not isinstance(stored, list) or len(stored) != len(set(levels)):
        raise ValueError(
            f"{model_type(hf)}: deepstack_visual_indexes {stored!r:.40} are not different layers"
        )
    return tuple(levels)


class PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        side = config.patch_size
        self.size = config.in_channels, config.temporal_patch_size, side, side
        kernel = self.size[1:]
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, pixels_PW: Tensor) -> Tensor:
        x_PC: Tensor = self.proj(pixels_PW.view(-1, *self.size)).flatten(1)
        return x_PC


class Attention(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = 3, config.num_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_PC: Tensor, query_start: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_PNH, k_PNH, v_PNH = self.qkv(x_PC).unflatten(-1, self.heads).unbind(-3)
        q_f32, k_f32 = apply_rope(q_PNH.float(), k_PNH.float(), cos, sin)
        q_PNH, k_PNH = q_f32.to(x_PC.dtype), k_f32.to(x_PC.dtype)
        out_PNH = ops.varlen_attention(q_PNH, k_PNH, v_PNH, query_start, scale=self.scale)
        out_PC: Tensor = self.proj(out_PNH.flatten(-2))
        return out_PC


class MLP(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_PC: Tensor) -> Tensor:
        y_PC: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x_PC), approximate="tanh"))
        return y_PC


class Block(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, EPS)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x_PC: Tensor, query_start: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_PC = x_PC + self.attn(self.norm1(x_PC), query_start, cos, sin)
        x_PC = x_PC + self.mlp(self.norm2(x_PC))
        return x_PC


class PatchMerger(nn.Module):
    """The patches of a token, side by side, to the width of the language model."""

    def __init__(self, config: VisionConfig, *, norm_of_token: bool):
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.norm_of_token = norm_of_token
        self.norm = nn.LayerNorm(self.width if norm_of_token else config.hidden_size, EPS)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, config.out_hidden_size)

    def forward(self, x_PC: Tensor) -> Tensor:
        if self.norm_of_token:
            x = self.norm(x_PC.reshape(-1, self.width))
        else:
            x = self.norm(x_PC).reshape(-1, self.width)
        y_ID: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return y_ID


class VisionEncoder(nn.Module):
    """Blocks at deepstack_visual_indexes have a merger of their own: what the language model adds
    after its first layers (DeepStack, Meng et al. 2024).
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.levels = config.deepstack_visual_indexes
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.table_side**2, config.hidden_size)
        rope: Rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        self.rotary_pos_emb = Rotary(rope, config.head_dim // 2)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_of_token=False)
        if self.levels:
            mergers = (PatchMerger(config, norm_of_token=True) for _ in self.levels)
            self.deepstack_merger_list = nn.ModuleList(mergers)

    def forward(self, pixels: Tensor, patches: PatchInputs) -> Tensor:
        """pixels [P, W] -> [I, E]."""
        x_PC = self.patch_embed(pixels.to(self.pos_embed.weight.dtype))
        places_PC = (self.pos_embed(patches.corners) * patches.weights[..., None]).sum(1)
        x_PC = x_PC + places_PC.to(x_PC.dtype)
        # Half of the angles turn by the row, half by the column.
        angles = patches.coordinates[..., None].float() * self.rotary_pos_emb.inv_freq
        cos, sin = self.rotary_pos_emb.tables(angles.flatten(1), torch.float32)
        added = []
        for i, block in enumerate(self.blocks):
            x_PC = block(x_PC, patches.query_start, cos, sin)
            if i in self.levels:
                added.append(self.deepstack_merger_list[self.levels.index(i)](x_PC))
        return torch.cat((self.merger(x_PC), *added), -1)
