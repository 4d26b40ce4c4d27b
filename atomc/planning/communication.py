"""What the devices of a plan send each other in a step, and how its parameters are cut."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from atomc.cost.efficiency import Predicted
from atomc.models.config import integer
from atomc.ops.op_cost import sent_to_gather, sent_to_sum
from atomc.parallel.sharding import Sharding
from atomc.planning.device_model import Model
from atomc.planning.plan_report import CollectiveRow, Communication, CutRow, Workload
from atomc.platform import Platform
from atomc.report.render.table import collapsed


def communication_of(
    model: Model,
    sharding: Sharding,
    load: Workload,
    platform: Platform,
    predicted: Sequence[Predicted],
) -> Communication:
    """All-reduces after layers whose results are summed and after the embedding, and a gather of
    the logits, of the step and of the draft steps after it; or what the kernels of the graph send.
    """
    token_bytes = integer(model.config, "hidden_size") * model.dtype.itemsize
    calls = _calls(model, sharding, load, token_bytes)
    calls.update((p.op, collapsed(p.module_path), int(p.sent)) for p in predicted if p.sent)
    link = platform.link
    rows = [
        CollectiveRow(kind, path, count, sent, sent / link if link else None)
        for (kind, path, sent), count in calls.items()
    ]
    reduces, gathers = (
        sum(row.calls for row in rows if row.kind == kind) for kind in ("all-reduce", "gather")
    )
    total = sum(row.calls * row.sent for row in rows)
    cuts = _cuts(model.module, sharding)
    return Communication(reduces, gathers, load.tokens * token_bytes, total, link, rows, cuts)


def _calls(
    model: Model, sharding: Sharding, load: Workload, token_bytes: int
) -> Counter[tuple[str, str, int]]:
    """How many collectives after layers there are of each (kind, path, bytes that a device sends).

    token_bytes  of the hidden states of a token
    """
    summed, gathered = _collectives(model.module, sharding)
    calls: Counter[tuple[str, str, int]] = Counter()
    for layers, tokens in _steps(model, load):
        for path, layer in layers.items():
            if layer in summed:
                sent = sent_to_sum(tokens * token_bytes, model.devices)
                calls["all-reduce", collapsed(path), int(sent)] += 1
            elif layer in gathered:
                vocabulary = len(layer.get_parameter("weight"))
                logits = load.sequences * vocabulary * model.dtype.itemsize
                sent = sent_to_gather(logits, model.devices)
                calls["gather", collapsed(path), int(sent)] += 1
    return calls


def _steps(model: Model, load: Workload) -> list[tuple[Mapping[str, nn.Module], int]]:
    """The layers of the step and of each draft step after it, by their paths in the plan, and the
    tokens that they compute.
    """
    layers = model.draft_layers
    inner = {module for draft in layers for module in draft.layer.modules()}
    of_model = {name: layer for name, layer in model.module.named_modules() if layer not in inner}
    drafted = [
        {f"draft.{name}": layer for name, layer in draft.named_modules()} for draft in layers
    ]
    further = drafted[-1:] * (model.drafts - len(drafted))
    return [
        (of_model, load.tokens),
        *((of_layer, load.tokens) for of_layer in drafted),
        *((of_layer, load.sequences) for of_layer in further),
    ]


def _collectives(module: nn.Module, sharding: Sharding) -> tuple[set[nn.Module], set[nn.Module]]:
    """The layers whose results are summed, and those whose outputs are gathered."""
    tables = {module.get_submodule(name) for name in sharding.tables}
    embeddings = {layer for layer in tables if isinstance(layer, nn.Embedding)}
    summed = {module.get_submodule(name) for name in sharding.summed}
    return summed | embeddings, tables - embeddings


def _cuts(module: nn.Module, sharding: Sharding) -> list[CutRow]:
    """A row for parameters that are equal in all layers, cut ones first."""
    divided = {*sharding.linears, *sharding.experts, *sharding.tensors, *sharding.tables}
    how = {name: sharding.plan[name] for name in divided}
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for name, parameter in module.named_parameters():
        layer, _, _ = name.rpartition(".")
        experts, _, _ = layer.rpartition(".")  # of which a quantized projection is a child
        cut = next((how[owner] for owner in (name, layer, experts) if owner in how), "")
        counts[collapsed(name), cut, tuple(parameter.shape)] += 1
    rows = [CutRow(path, cut, shape, count) for (path, cut, shape), count in counts.items()]
    return sorted(rows, key=lambda row: not row.how)
