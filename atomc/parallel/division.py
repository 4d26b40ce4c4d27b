"""How a model is divided over processes: into stages, and within a stage by parts of layers."""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from atomc.files.json_types import JSONMapping
from atomc.parallel import sizes
from atomc.parallel.expert_placement import Placement
from atomc.parallel.process_group import ALONE, Place
from atomc.parallel.sharding import Sharding
from atomc.parallel.stages import ALL_NAMES, OwnNames, cut_stage


@dataclass(frozen=True)
class Division:
    """The part of a model that a process has.

    ep         experts by expert, not each by its width
    placement  which rank has which expert; others are divided into equal ranges
    """

    place: Place = ALONE
    ep: bool = False
    placement: Placement = field(default_factory=dict)

    def check(self, config: JSONMapping) -> None:
        """Raise ValueError if a model of this config.json does not divide."""
        tp, stage, experts, _ = self.place
        sizes.check(config, tp.size if tp else 1, ep=self.ep)
        sizes.check_experts(config, experts.size * (tp.size if tp else 1) if experts else 1)
        sizes.check_stages(config, len(stage.ranks) if stage else 1)

    def cut_stage(self, model: nn.Module) -> OwnNames:
        """Keep the modules of this stage, in place; its names of parameters."""
        stage = self.place.stage
        return ALL_NAMES if stage is None else cut_stage(model, stage)

    def shard(self, model: nn.Module, quantized: Collection[str] = ()) -> Sharding | None:
        """How the layers of a stage are divided; None: one rank has all.

        quantized  names of layers that are quantized afterwards
        """
        tp, _, experts, _ = self.place
        if tp is None:
            if experts is None:
                return None
            return Sharding.of_experts(model, experts, placement=self.placement)
        return Sharding.of(
            model,
            tp,
            ep=self.ep,
            quantized=quantized,
            placement=self.placement,
            data_ranks=experts,
        )


WHOLE = Division()  # the model on one process
