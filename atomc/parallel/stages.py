"""Cuts a model into the stages of a pipeline: each process keeps some of the decoder layers.

What other stages hold becomes modules without parameters, under the same names, so that the forward
of any class still calls all of its layers. Of 5 layers in 3 stages, the second has two:

    embed_tokens   0           1             2  3  4            norm        lm_head
    Received       OtherStage  Received      2  3  Sent         OtherStage  OtherStage

What a forward computes before the received states and behind the sent ones is not used, and no part
of the compiled program: a class may scale its embeddings and logits.

Draft layers are in the last stage, which has the hidden states that they read. It then has the
embedding, too, from which they read the tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from atomc.models.decoder import DECODER_FRAME, Decoder
from atomc.models.mtp import WithDraftLayers
from atomc.parallel.process_group import PipelineStage
from atomc.weights.parameters import parameter_names

T = TypeVar("T")
PLAIN = (str, int, float, bool)


class StandIn(nn.Module):
    """In place of a module: has its plain attributes, such as the kind of its attention, which a
    forward may read.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if type(value) in PLAIN and not name.startswith("_") and name != "training":
                setattr(self, name, value)


class OtherStage(StandIn):
    """In place of a module of another stage: returns its first argument."""

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        return x


class Border(OtherStage):
    """Where states [T, D] enter or leave a stage; a list has them while the model runs."""

    def __init__(self, module: nn.Module, frame: "Frame", states: list[Tensor]) -> None:
        super().__init__(module)
        self.width, self.dtype, self.states = frame.width, frame.dtype, states


class Received(Border):
    """In place of the embedding, and of the layer before those of this stage: returns what the
    previous stage sent.
    """

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        [states] = self.states
        # Tokens [T] or [1, T], or their states
        batched = x.dim() - (x.dtype != torch.int64) == 2
        return states.view(1, *states.shape) if batched else states


class Sent(Border):
    """In place of the layer behind those of this stage: keeps its input, which is sent."""

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        self.states.append(x)
        return x


class StageModel(nn.Module):
    """module(input_ids, positions, hidden, logits_rows), without hidden in the first stage: the
    states [T, D] for the next stage; logits [R, V] in the last one.

    Shares the parameters of `module`, which `cut_stage` has cut.

    width, dtype  of the states
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        borders = [part for part in module.modules() if isinstance(part, Border)]
        self.width, self.dtype = borders[0].width, borders[0].dtype
        self.received = next((part.states for part in borders if isinstance(part, Received)), None)
        self.sent = next((part.states for part in borders if isinstance(part, Sent)), None)

    def forward(self, input_ids: Tensor, positions: Tensor, *others: Tensor) -> Tensor:
        *hidden, logits_rows = others
        if self.received is not None:
            self.received.extend(hidden)
        out: Tensor = self.module(input_ids, positions, logits_rows)
        if self.received is not None:
            self.received.clear()
        if self.sent is not None:
            out = self.sent[0].flatten(0, -2)
            self.sent.clear()
        return out


@dataclass(frozen=True)
class OwnNames:
    """The parameters of a stage, by their names in the whole model.

    elsewhere  names of modules of other stages
    renamed    a tied parameter: a name that it has in the whole model only -> its first name here
    in_whole   the first name of each parameter in this stage -> its first name in the whole model
    """

    elsewhere: tuple[str, ...]
    renamed: Mapping[str, str]
    in_whole: Mapping[str, str]

    def select(self, stored: Mapping[str, T]) -> dict[str, T]:
        """Of the tensors of a checkpoint, those of this stage."""
        others = tuple(f"{name}." for name in self.elsewhere)
        of_stage = {name: tensor for name, tensor in stored.items() if not name.startswith(others)}
        moved = {new: stored[name] for name, new in self.renamed.items() if name in stored}
        return moved | of_stage


ALL_NAMES = OwnNames((), {}, {})


class Frame(NamedTuple):
    """The modules of a model: what is before its decoder layers, these, and what is behind them.

    num_layers    decoder layers; draft layers may be behind them under the same name
    width, dtype  of the states between layers
    """

    before: tuple[str, ...]
    layers: str
    num_layers: int
    behind: tuple[str, ...]
    width: int
    dtype: torch.dtype


def frame_of(model: nn.Module) -> Frame:
    """Raises ValueError for a model whose layers are not known."""
    owner, decoder, parts = _decoder_of(model)
    modules = {part: getattr(decoder, part, None) for part in parts}
    layers = next((part for part, m in modules.items() if isinstance(m, nn.ModuleList)), None)
    embedding = modules.get(parts[0]) if parts else None
    if layers is None or not isinstance(embedding, nn.Embedding):
        raise ValueError(
            f"{_name(model)} does not say which of its modules are layers that follow each other "
            "(base_model_pp_plan of transformers): hidden states of its layers have no names, and "
            "pp cannot cut it"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    inner = paths[id(decoder)]
    at = parts.index(layers)
    heads = [paths[id(child)] for child in owner.children() if child is not decoder]
    return Frame(
        tuple(f"{inner}.{part}" for part in parts[:at]),
        f"{inner}.{layers}",
        decoder.num_layers if isinstance(decoder, Decoder) else len(getattr(decoder, layers)),
        (*(f"{inner}.{part}" for part in parts[at + 1 :]), *heads),
        embedding.weight.shape[1],
        embedding.weight.dtype,
    )


def _decoder_of(model: nn.Module) -> tuple[nn.Module, nn.Module, tuple[str, ...]]:
    """(the module with the decoder and its heads, the decoder, the names of the decoder's parts in
    the order of the forward, which are empty if they are not known).
    """
    hf_model: Any = getattr(model, "hf_model", None)
    if hf_model is None:
        decoder: nn.Module = getattr(model, "decoder", model)
        return model, decoder, DECODER_FRAME if isinstance(decoder, Decoder) else ()
    config = hf_model.config.get_text_config()
    return hf_model, hf_model.base_model, tuple(getattr(config, "base_model_pp_plan", None) or ())


def _name(model: nn.Module) -> str:
    return type(getattr(model, "hf_model", model)).__name__


def cut_stage(model: nn.Module, stage: PipelineStage) -> OwnNames:
    """Keep the modules of this stage, in place. Raises ValueError for a model that has fewer layers
    than there are stages, or that cannot be cut.
    """
    if hasattr(model, "encode_images"):
        raise ValueError(f"{_name(model)} has an image encoder: pp supports models of text only")
    config = getattr(getattr(model, "hf_model", None), "config", None)
    if config is not None and getattr(config.get_text_config(), "num_kv_shared_layers", None):
        raise ValueError(
            f"{_name(model)} has layers that read the keys of others: pp cannot cut it"
        )
    frame = frame_of(model)
    if frame.num_layers < len(stage.ranks):
        stages = len(stage.ranks)
        raise ValueError(f"{frame.num_layers} layers do not give {stages} stages one each")
    names = parameter_names(model)
    replaced = _replacements(model, frame, stage)
    for name, module in replaced.items():
        model.set_submodule(name, module)
    return _own_names(model, names, tuple(replaced))


def _replacements(model: nn.Module, frame: Frame, stage: PipelineStage) -> dict[str, nn.Module]:
    """What is in place of the modules of other stages, by their names."""
    layers = model.get_submodule(frame.layers)
    assert isinstance(layers, nn.ModuleList)
    own_layers = stage.layers(frame.num_layers)
    numbers = range(frame.num_layers if stage.is_last else len(layers))
    other_layers = [i for i in numbers if i not in own_layers]
    replaced = _others(model, [f"{frame.layers}.{i}" for i in other_layers])
    if not stage.is_first:
        states: list[Tensor] = []
        embedding, *others = frame.before
        replaced |= _others(model, others)
        received = [embedding, f"{frame.layers}.{own_layers.start - 1}"]
        has_drafts = isinstance(model, WithDraftLayers) and model.draft_layers()
        for name in received[1:] if stage.is_last and has_drafts else received:
            replaced[name] = Received(model.get_submodule(name), frame, states)
    if not stage.is_last:
        name = f"{frame.layers}.{own_layers.stop}"
        replaced |= _others(model, frame.behind)
        replaced[name] = Sent(model.get_submodule(name), frame, [])
    return replaced


def _own_names(
    model: nn.Module, all_names: Iterable[tuple[str, ...]], elsewhere: tuple[str, ...]
) -> OwnNames:
    """The parameters of a model after its cut. whole: the names of each parameter before it."""
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own_names = [(next(filter(held.__contains__, names), None), names) for names in all_names]
    first_names = {first: names for first, names in own_names if first is not None}
    return OwnNames(
        elsewhere,
        {name: first for first, names in first_names.items() for name in names if name not in held},
        {first: names[0] for first, names in first_names.items()},
    )


def _others(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    return {name: OtherStage(model.get_submodule(name)) for name in names}
