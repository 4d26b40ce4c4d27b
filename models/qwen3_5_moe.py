"""Qwen3.5 with experts, its text model: Qwen3.5 whose MLPs are those of Qwen3-Next."""

from dataclasses import dataclass
from typing import Self

from atomc.files.json_types import JSONMapping
from atomc.models import qwen3_5
from atomc.models.qwen3_next import ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512

    @classmethod
    def from_hf(cls, hf: JSONMapping, **computed: object) -> Self:
        return super().from_hf(hf, norm_topk_prob=True, **computed)


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5ForCausalLM):
    config_class = Config
