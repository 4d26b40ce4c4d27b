"""Builds a model of a config.json: a class of atomc, or one of transformers."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.fx.node import Argument
from torch.overrides import TorchFunctionMode

from atomc.files.json_types import JSONMapping
from atomc.models import REGISTRY, architectures_of, model_class
from atomc.stock import adapter


def create_model(
    config: JSONMapping,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    draft_layers: int = 0,
) -> nn.Module:
    """The model of a config.json with random weights, in fp32 unless a dtype is given.

    draft_layers  with so many of its draft layers (draft_checkpoint.num_draft_layers)

    On device "meta" it needs no memory. Raises ValueError for an unknown architecture or an
    unsupported config value.
    """
    architectures = architectures_of(config)
    cls = model_class(architectures)
    if cls is None:
        return adapter.build(
            adapter.hf_class(architectures, sorted(REGISTRY)), config, dtype, device
        )
    where = torch.device(device or "cpu")
    with where, _Unfilled() if where.type == "meta" else nullcontext():
        options = {"draft_layers": draft_layers} if draft_layers else {}
        model: nn.Module = cls.from_hf(config, **options)  # type: ignore[attr-defined]
    return model.to(dtype)


class _Unfilled(TorchFunctionMode):
    """Skips initialization, which has no effect on meta, but imports torch's compiler."""

    def __torch_function__(
        self,
        function: Callable[..., Argument],
        types: Sequence[type],
        args: tuple[Argument, ...] = (),
        kwargs: dict[str, Argument] | None = None,
    ) -> Argument:
        named = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return function(*args, **named)
