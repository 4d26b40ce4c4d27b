"""A model without its head: returns hidden states instead of logits, with the same weights."""

import copy

from torch import nn

HEADS = ("lm_head", "embed_out")


def headless_model(module: nn.Module) -> nn.Module:
    """A copy of `module`, which shares its parameters and returns the input of its head.

    Raises ValueError if no submodule is named as in HEADS.
    """
    for path, _ in module.named_modules():
        if path.rpartition(".")[2] in HEADS:
            return replaced(module, path, nn.Identity())
    raise ValueError(
        f"{type(module).__name__} has no head named {' or '.join(HEADS)}: hidden states are not "
        "available"
    )


def replaced(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """A copy of `module`, which shares all its parts but those on the path: these are copies, too,
    and the last one is `new`.
    """
    name, _, rest = path.partition(".")
    child = module._modules[name]
    assert child is not None
    twin = copy.copy(module)
    twin._modules = {**module._modules, name: replaced(child, rest, new) if rest else new}
    return twin
