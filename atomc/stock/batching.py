"""Attention for the continuous batching of transformers (`model.generate_batch`), written in ops,
so that torch.compile traces a step as one graph.

The attention functions of transformers update its paged cache in a function that Dynamo may not
trace, which breaks the graph once a layer, or whose writes copy the cache. This one reads the
tensors of the cache and calls ops.kv_write and ops.paged_attention. It gets the cache in its
options: as transformers passes it (to 5.23), or from the `update` of PagedCache, which layers call
before their attention (from 5.24).

T tokens of all sequences, S sequences, R cached tokens that the step reads, K key/value heads, D
head width, B blocks of a sequence.
"""

import sys
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.masking_utils import eager_mask, sdpa_mask

from atomc import ops
from atomc.stock.batching_check import check_batching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names that contain "flash" are what continuous batching accepts besides its own attention, and it
# then builds no masks. "2" or "3" in the name would select the calls of FlashAttention. Where
# transformers has names for the paged attention of each function, it adds "paged|" to all others.
PREFIX = "paged|" if "paged|sdpa" in AttentionInterface._global_mapping else ""
ATTENTION = f"{PREFIX}atom_flash"
ELSE_EAGER = f"{PREFIX}atom_flash_else_eager"


def prepare_batching(model: "PreTrainedModel", *, self_check: bool = True) -> "PreTrainedModel":
    """Have the model's attention call ops where transformers batches continuously, in place, so
    that `generate_batch` with a compile config runs one graph a step. Other calls of the model run
    with the attention "eager" if the model has it now, else with "sdpa".
    `model.set_attn_implementation` undoes it.

    self_check  before its first batch, compare a few steps with the model's own forward; the batch
                raises ValueError where they differ by more than rounding

    Raises ValueError for a model with an attention of its own.
    """
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not support a custom attention (AttentionInterface of "
            "transformers)"
        )
    AttentionInterface.register(ATTENTION, _attention)
    AttentionInterface.register(ELSE_EAGER, _attention_or_eager)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    AttentionMaskInterface.register(ELSE_EAGER, eager_mask)
    eager = model.config._attn_implementation in ("eager", ELSE_EAGER)
    # Not set_attn_implementation, which looks for a package of this name.
    model.config._attn_implementation = ELSE_EAGER if eager else ATTENTION
    if _pass_paged_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_pass_paged_cache, with_kwargs=True)
    if self_check:
        model.__dict__["init_continuous_batching"] = MethodType(_check_and_init, model)
    else:
        model.__dict__.pop("init_continuous_batching", None)
    return model


def _is_prepared(model: "PreTrainedModel") -> bool:
    return model.config._attn_implementation in (ATTENTION, ELSE_EAGER)


def _check_and_init(model: "PreTrainedModel", *args: Any, **options: Any) -> Any:
    """The model's init_continuous_batching, with a check before the first batch."""
    this = model.__dict__.pop("init_continuous_batching")  # the check calls it
    if _is_prepared(model):
        try:
            check_batching(model)
        except BaseException:
            model.__dict__["init_continuous_batching"] = this
            raise
    return model.init_continuous_batching(*args, **options)


class PagedCache(PagedAttentionCache):  # type: ignore[misc]
    """Gives the paged cache of transformers to the attention function, which writes to it.

    Of its class for the masks of transformers, which are none where they see the class.
    """

    def __init__(self, paged: PagedAttentionCache):
        self.paged = paged

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, T, D] of the new tokens, as they are. kwargs: those with which the
        layer calls its attention function.
        """
        kwargs["cache"] = self
        return key_states, value_states


def _pass_paged_cache(
    model: "PreTrainedModel", args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook."""
    cache = options.get("cache")
    if not isinstance(cache, PagedAttentionCache) or not _is_prepared(model):
        return None
    return args, {**options, "cache": PagedCache(cache)}


class StockAttention(nn.Module):
    """An attention layer of transformers, as seen by its attention function."""

    layer_idx: int


Result = tuple[Tensor, Tensor | None]


def _attention_or_eager(
    module: StockAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Result:
    """The attention function of a model that runs "eager" otherwise."""
    if options.get("cache") is None:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        result: Result = eager(module, query, key, value, attention_mask, **options)
        return result
    return _attention(module, query, key, value, attention_mask, **options)


def _attention(
    module: StockAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: PagedCache | None = None,
    **options: Any,
) -> Result:
    """The attention function of transformers: query [1, N, T, D], key and value [1, K, T, D] -> [1,
    T, N, D].
    """
    if cache is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: Result = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return result
    layer = _paged_layer(cache.paged, module.layer_idx)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if (k.shape[1:], v.shape[1:]) != (layer.keys.shape[2:], layer.values.shape[2:]):
        raise ValueError(
            f"{type(module).__name__}: keys [..., {k.shape[-2]}, {k.shape[-1]}] and values "
            f"[..., {v.shape[-2]}, {v.shape[-1]}] do not fit the paged cache of transformers "
            f"[..., {layer.keys.shape[-2]}, {layer.keys.shape[-1]}]"
        )
    slots, read = (options[name][layer.group] for name in ("write_index", "read_index"))
    key_start = options["cu_seq_lens_k"]
    if isinstance(key_start, dict):
        key_start = key_start[layer.kind]
    if layer.sentinel is None:
        token = ops.kv_write(k, v, layer.keys, layer.values, slots)
        keys, values = layer.keys, layer.values
        # Without cached tokens there is nothing to read but what was written.
        tables = _block_tables(read if read.shape[0] else slots, key_start, keys.shape[1])
    else:
        # New tokens take the places of old ones that the first of them still read.
        keys, values = _merge_new(layer, k, v, read, layer.sentinel) if read.shape[0] else (k, v)
        token = ops.kv_write(k, v, layer.keys, layer.values, slots)
        rows = torch.arange(keys.shape[0], device=keys.device)
        keys, values = keys[:, None], values[:, None]
        tables = _block_tables(rows, key_start, 1)
    sequences = _sequences(options["cu_seq_lens_q"], key_start.diff(), tables, q.shape[0])
    out = ops.paged_attention(
        q,
        keys,
        values,
        *sequences,
        token,
        options.get("s_aux"),
        scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window") or 0,
        softcap=options.get("softcap") or 0.0,
    )
    return out[None], None


class _PagedLayer(NamedTuple):
    """The part of the cache that belongs to a layer: keys and values [pages, page size, K, D].

    group     the number of its index tensors
    kind      the name of its sequence lengths
    sentinel  the index that marks a new token among those to read; None: all are in the cache
    """

    keys: Tensor
    values: Tensor
    group: int
    kind: str
    sentinel: int | None


def _paged_layer(cache: PagedAttentionCache, number: int) -> _PagedLayer:
    """Views of one tensor for all layers: as views of several graph inputs in the same memory, each
    write would copy the cache. Before transformers 5.23: the tensors of the layer.
    """
    if not hasattr(cache, "layer_to_allocator"):
        group, place = cache.layer_index_to_group_indices[number]
        page_shape = cache.block_size, cache.num_key_value_heads, cache.head_dim
        keys, values = (
            x[place].view(-1, *page_shape) for x in (cache.key_cache, cache.value_cache)
        )
        if cache.sliding_windows[number] == 1:  # its mark of layers without a window
            return _PagedLayer(keys, values, group, "full_attention", None)
        return _PagedLayer(keys, values, group, "sliding_attention", cache.sentinel_index)
    memory = next(iter(cache.cache_allocators.values())).cache_tensor.flatten()
    allocator = cache.layer_to_allocator[number]
    shape = (allocator.tokens_per_page, allocator.num_key_value_heads, allocator.head_dim)
    page = shape[0] * shape[1] * shape[2]
    layers = allocator.layer_indices
    first = 2 * layers.index(number)  # pages of keys and of values alternate, layer after layer
    num_pages = memory.shape[0] // page - (2 * len(layers) - 1)
    keys, values = (
        memory[start * page : (start + num_pages) * page].view(num_pages, *shape)
        for start in (first, first + 1)
    )
    sliding = allocator.layer_type == "sliding_attention"
    sentinel = allocator.sentinel_index if sliding else None
    return _PagedLayer(keys, values, allocator.index, allocator.layer_type, sentinel)


def _merge_new(
    layer: _PagedLayer, k: Tensor, v: Tensor, read: Tensor, sentinel: int
) -> tuple[Tensor, Tensor]:
    """The keys and values [R, K, D] that a step reads, in order: cached ones, and new ones in the
    places of the sentinels.
    """
    is_new = read.eq(sentinel)[:, None, None]
    keys, values = (
        cached.flatten(0, 1)[read].masked_scatter(is_new, new)
        for cached, new in ((layer.keys, k), (layer.values, v))
    )
    return keys, values


def _block_tables(slots: Tensor, key_start: Tensor, block_size: int) -> Tensor:
    """The blocks [S, B] i32 of each sequence, whose tokens are in slots[key_start[s]:key_start[s +
    1]]; B is enough for all of them.
    """
    num_slots = slots.shape[0]
    blocks = torch.arange((num_slots + block_size - 1) // block_size, device=slots.device)
    first = key_start[:-1, None] + blocks * block_size
    return (slots[first.clamp(max=num_slots - 1)] // block_size).to(torch.int32)


def _sequences(
    query_start: Tensor, seq_lens: Tensor, tables: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The operands of ops.paged_attention, with further sequences without tokens.

    The op reads a step of as many rows as sequences as a decode step, and a padded step of prompts
    may have these numbers. Nothing on the host distinguishes the two.
    """
    more = num_tokens + 1 - seq_lens.shape[0]
    return (
        torch.cat((query_start, query_start[-1:].expand(more))),
        torch.cat((seq_lens, seq_lens.new_zeros(more))),
        torch.cat((tables, tables.new_zeros(more, tables.shape[1]))),
    )
