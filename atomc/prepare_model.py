"""Prepares a model of the user's own program for torch.compile, and undoes it."""

import logging

from torch import nn

from atomc.capture import regions
from atomc.stock.delta_net import DELTA_NETS

log = logging.getLogger("atomc")


def prepare(model: nn.Module) -> nn.Module:
    """Prepare the model to be compiled for inference, in place: eval mode, no gradients, repeated
    layers marked, gated delta nets of transformers entered.

    torch.compile then traces one layer of each kind, with any backend, until
    `atomc.unprepare(model)`. Where a layer cannot be traced as a whole, because of a graph break or
    a limit of this torch, all layers of its class in the model lose their mark, with a warning and
    a note in the report. A gated delta net that is called
    without a cache calls ops.gated_delta_rule while it is compiled; other calls run as before.
    """
    for reason in DELTA_NETS.enter_while_compiled(model):
        log.warning("prepare: %s", reason)
    return regions.prepare(model)


def unprepare(model: nn.Module) -> nn.Module:
    """Remove the marks from the model's layers, and leave its gated delta nets."""
    DELTA_NETS.leave(model)
    return regions.unprepare(model)
