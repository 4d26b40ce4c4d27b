"""A module in evaluation mode for a while: one that is trained drops out activations otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Within it the module and its submodules are in evaluation mode, afterwards as before."""
    training = [each for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True
