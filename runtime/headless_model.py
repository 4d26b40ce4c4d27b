"""The same model without its head: hidden states instead of logits, over the same weights."""

import copy

from torch import nn

HEADS = ("lm_head", "embed_out")


def headless_model(module: nn.Module) -> nn.Module:
    """A model that returns what the head of `module` gets. Both have the same parameters, and
    `module` stays as it is.

    Raises ValueError if there is no head by a name we know.
    """
    for path, _ in module.named_modules():
        if path.rpartition(".")[2] in HEADS:
            return _replaced(module, path, nn.Identity())
    raise ValueError(
        f"{type(module).__name__} has no head named {' or '.join(HEADS)}, so its hidden states "
        "are not known"
    )


def _replaced(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """A shallow copy of the modules on the path, the last of which is the new one."""
    name, _, rest = path.partition(".")
    child = module._modules[name]
    assert child is not None
    twin = copy.copy(module)
    twin._modules = {**module._modules, name: _replaced(child, rest, new) if rest else new}
    return twin
