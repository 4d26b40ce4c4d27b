"""Whether a number of ranks divides a model, from its config.json: a model that does not is refused
before anything is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence

from atomc.files.json_types import JSONMapping
from atomc.models.config import NUM_EXPERTS

# Fields whose values are divided, and what they count.
HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"
LINEAR_HEADS, LINEAR = "linear_num_key_heads", "linear_attention"
WIDTH, EXPERT_WIDTHS = "intermediate_size", ("moe_intermediate_size",)
SHARED_WIDTHS = ("shared_expert_intermediate_size",)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
MOST = 1024  # ranks that are tried for the sentence of what works


def check(config: JSONMapping, size: int, *, ep: bool = False) -> None:
    """Raise ValueError if a model of this config.json does not divide over so many ranks, with the
    numbers that would work.

    ep  experts by expert, not each by its width
    """
    fields = _fields(config)
    reason = next(_problems(fields, size, ep), None)
    if reason is not None:
        works = [n for n in range(1, MOST + 1) if next(_problems(fields, n, ep), None) is None]
        raise ValueError(f"{reason}; {_listed(works)}")


def check_experts(config: JSONMapping, size: int) -> None:
    """Raise ValueError if the experts of a model of this config.json do not divide over so many
    ranks, of which each has all the rest.
    """
    if size == 1:
        return
    experts = _count(_fields(config), *NUM_EXPERTS)
    if experts is None:
        raise ValueError(f"the model has no experts to divide over {size} ranks (ep)")
    check_that_experts_divide(experts, size)


def check_that_experts_divide(experts: int, size: int) -> None:
    """Raise ValueError if so many ranks cannot have equally many of the experts of a layer."""
    if size < 1 or experts % size:
        works = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ValueError(f"{experts:,} experts do not divide by {size}; {_listed(works)}")


def _listed(works: Sequence[int]) -> str:
    """Which numbers of ranks work."""
    *others, last = map(str, works)
    return f"{', '.join(others)} and {last} do" if others else "only 1 does"


def check_stages(config: JSONMapping, stages: int) -> None:
    """Raise ValueError if a model of this config.json has fewer layers than stages."""
    layers = _count(_fields(config), *LAYERS)
    if layers is not None and layers < stages:
        raise ValueError(
            f"{layers:,} layers do not give {stages} stages one each; at most {layers} do"
        )


def _fields(config: JSONMapping) -> JSONMapping:
    """The fields of a config.json, or of its language model."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _count(fields: JSONMapping, *names: str) -> int | None:
    """The first of these fields that is a positive integer."""
    values = (fields.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _problems(fields: JSONMapping, size: int, ep: bool) -> Iterator[str]:
    """Why so many ranks do not divide the model."""
    heads = _count(fields, HEADS)
    if heads is not None and heads % size:
        yield f"{heads:,} heads ({HEADS}) do not divide by {size}"
    of_keys = _count(fields, KV_HEADS)
    if of_keys is not None and of_keys % size and size % of_keys:
        yield f"{of_keys:,} heads of keys and values ({KV_HEADS}) do not divide by {size}"
    recurrent = _count(fields, LINEAR_HEADS)
    types = fields.get("layer_types")
    has_recurrent = not isinstance(types, list) or LINEAR in types
    if recurrent is not None and has_recurrent and recurrent % size:
        yield f"{recurrent:,} key heads of delta nets ({LINEAR_HEADS}) do not divide by {size}"
    experts = _count(fields, *NUM_EXPERTS)
    if ep and experts is not None and experts % size:
        yield f"{experts:,} experts do not divide by {size}"
    yield from _problems_of_widths(fields, size, ep)


def _problems_of_widths(fields: JSONMapping, size: int, ep: bool) -> Iterator[str]:
    """Why so many ranks do not divide the widths of MLPs."""
    block = _block_of_scales(fields)
    for name in _widths(fields, ep):
        width = _count(fields, name)
        if width is None:
            continue
        if width % size:
            yield f"{width:,} columns ({name}) do not divide by {size}"
        elif size > 1 and width // size % block:
            yield (
                f"a cut of {width:,} columns ({name}) in {size} gives {width // size:,}, not a "
                f"multiple of {block}, which share a scale: they do not divide by {size}"
            )


def _widths(fields: JSONMapping, ep: bool) -> tuple[str, ...]:
    """The fields with widths of MLPs that are divided."""
    names = (WIDTH, *SHARED_WIDTHS)
    if ep and _count(fields, *EXPERT_WIDTHS) is None:
        return SHARED_WIDTHS  # Mixtral's experts have the width of other models' MLPs
    return names if ep else (*names, *EXPERT_WIDTHS)


def _block_of_scales(fields: JSONMapping) -> int:
    """How many inputs or outputs of a linear layer share a scale, at least one."""
    stored = fields.get("quantization_config")
    if not isinstance(stored, Mapping):
        return 1
    blocks = stored.get("weight_block_size")
    if isinstance(blocks, list) and blocks and isinstance(blocks[-1], int):
        return max(1, blocks[-1])
    if stored.get("quant_method") == "mxfp4":
        return 32
    group = stored.get("group_size")
    groups = stored.get("config_groups")
    if group is None and isinstance(groups, Mapping):
        of_weights = [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
        sizes = [w.get("group_size") for w in of_weights if isinstance(w, Mapping)]
        group = next(iter(sizes), None)
    return group if isinstance(group, int) and group > 0 else 1
