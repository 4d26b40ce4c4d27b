"""The parameters and buffers of a model by name; gives a model on meta those of a device."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from atomc.weights.registry import parameter_of


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [tuple(group) for group in names.values()]


def tensor_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter, and of each buffer that a checkpoint stores."""
    parameters = parameter_names(model)
    names_of_parameters = {name for names in parameters for name in names}
    return parameters + [(name,) for name in model.state_dict() if name not in names_of_parameters]


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name."""
    owner, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), leaf)
    assert isinstance(tensor, Tensor), name
    return tensor


def assign(model: nn.Module, names: tuple[str, ...], weight: Tensor) -> None:
    """Set the parameter or buffer of all these names to the weight."""
    parameter = parameter_of(weight)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, leaf, weight if leaf in module._buffers else parameter)


def allocate_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Allocate a model's buffers on meta; modules such as Rotary set theirs when they move."""
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module._apply(lambda tensor: empty(tensor, device), recurse=False)  # type: ignore[no-untyped-call]
        elif not module._parameters:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
        else:  # beside parameters, which are loaded later
            buffers = module._buffers
            buffers |= {name: x.to(device) for name, x in buffers.items() if x is not None}


def empty(like: Tensor, device: torch.device | str) -> Tensor:
    """As torch.empty_like with strides, which imports symbolic shapes for a tensor on meta."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def fill_randomly(
    model: nn.Module,
    device: torch.device | str,
    parameters: Sequence[tuple[str, ...]] | None = None,
    in_whole: Mapping[str, str] | None = None,
) -> None:
    """Set parameters to random values: small, and around 1 for norms. They depend only on the name,
    shape, dtype and device type of a parameter.

    parameters  the names of each; None: all
    in_whole    the names of parameters in the whole model, where they differ
    """
    named = in_whole or {}
    for names in parameter_names(model) if parameters is None else parameters:
        like, name = model.get_parameter(names[0]), named.get(names[0], names[0])
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        assign(model, names, empty(like, device).normal_(mean, 0.02, generator=generator))
