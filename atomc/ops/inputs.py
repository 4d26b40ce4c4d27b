"""What the runtime passes to an input of a compiled graph: a tensor of the step, the size of one, a
tensor of the state, counts of experts, or weights of LoRA adapters.

It is in the record of the input's node (atomc.graph.node_record) and part of the compiled graph.
`name` is only used in dumps.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atomc.ops.state import KINDS, Step

# The fields of a Step that are arguments of the model, with these names.
MODEL_INPUTS = ("input_ids", "positions", "hidden", "logits_rows", "embeddings", "is_image")
# Roles of scales: [1] fp32, the factors of the codes of a cache.
SCALES = frozenset(scale for kind in KINDS.values() for scale in kind.scales)


class LoraShape(NamedTuple):
    """The LoRA adapters that a program has room for, and the layers that they may change.

    adapters  number of adapters loaded at once
    rank      maximum rank of an adapter
    targets   last names of the modules that adapters may change, such as "q_proj"; (): all linear
              layers of the repeated layers
    """

    adapters: int
    rank: int
    targets: tuple[str, ...] = ()

    def changes(self, path: str) -> bool:
        """Whether adapters may change the linear layer with this module path."""
        return not self.targets or path.rpartition(".")[2] in self.targets


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes besides token ids, positions and the rows of its logits.

    hidden      width and dtype of the hidden states after the positions (a draft model); None: none
    embeddings  width and dtype of the embeddings of images, the last arguments with the mask of
                their rows; None: none
    mrope       positions are [3, T] instead of [T]
    lora        the adapters of its linear layers, whose rows are a tensor of the step; None: none
    """

    hidden: tuple[int, torch.dtype] | None = None
    embeddings: tuple[int, torch.dtype] | None = None
    mrope: bool = False
    lora: LoraShape | None = None


TEXT = ModelInputs()


class PatchInputs(NamedTuple):
    """What a vision encoder takes besides the pixels of P patches.

    query_start  [S + 1] i32: rows query_start[s]:query_start[s + 1] are a frame, whose patches see
                 each other
    coordinates  [P, 2] i64: row and column of each patch in its image
    corners      [P, 4] i64: entries of the table of position embeddings around each patch
    weights      [P, 4] fp32: their shares in the embedding of the patch
    """

    query_start: Tensor
    coordinates: Tensor
    corners: Tensor
    weights: Tensor


@dataclass(frozen=True)
class StepInput:
    """A tensor of the Step, or the size of one of its dimensions.

    field  of Step; of GroupStep if there is a group
    group  the number of the GroupStep
    dim    the dimension whose size is passed; None: the tensor
    """

    field: str
    group: int | None = None
    dim: int | None = None

    @property
    def name(self) -> str:
        return self.field if self.group is None else f"{self.field}_{self.group}"

    def of(self, step: Step) -> Tensor | int:
        """Its value in this step."""
        tensor: Tensor = getattr(
            step if self.group is None else step.groups[self.group], self.field
        )
        return tensor if self.dim is None else tensor.shape[self.dim]


@dataclass(frozen=True)
class StateInput:
    """A tensor of one layer's state.

    spec  the number of the layer's StateSpec in the program
    role  which tensor: one of StateSpec.roles, which the runtime allocates, or one of SCALES
    per_sequence  its first dimension is the slot of a sequence; otherwise its first two dimensions
                  are blocks and tokens of a block
    """

    spec: int
    role: str
    per_sequence: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}_{self.spec}"

    @property
    def is_scale(self) -> bool:
        return self.role in SCALES


@dataclass(frozen=True)
class ExpertCounts:
    """How often each expert of a layer was chosen: [experts] int64, which the program owns.

    number  of the layer among those with experts
    """

    number: int
    module_path: str
    experts: int

    @property
    def name(self) -> str:
        return f"expert_counts_{self.number}"


@dataclass(frozen=True)
class LoraWeights:
    """The adapters' products of a linear layer, or of several that are merged, as the program owns
    them: A [adapters, P * rank, K] or B.T [adapters, rank, N] of P layers (ops.lora_linear).

    number  of the linear among those with adapters
    role    "lora_a" or "lora_b"
    paths   the module paths of the P layers; widths: their outputs, without those of padding
    shape   of the tensor, in the dtype of the layer's input
    """

    number: int
    role: str
    paths: tuple[str, ...]
    widths: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.role}_{self.number}"


GraphInput = StepInput | StateInput | ExpertCounts | LoraWeights
