"""Finds ops of a recording that compute again what an earlier one has computed, such as what the
layers of a model derive from a mask alike.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from atomc.replay.memory import Fixed, InTemporary, Memory, Temporary
from atomc.replay.recording import Call, Event

# The temporary that holds a tensor; None: an input or a fixed address, of which any may overlap.
Owner = Temporary | None


def share_calls(memory: Memory, events: Sequence[Event]) -> set[int]:
    """The numbers of the events that can be left out, since an earlier one returns the same. Their
    results get the places of those of the earlier one.
    """
    written = _writes(memory, events)
    first_calls: dict[Hashable, int] = {}
    left_out = set()
    for number, event in enumerate(events):
        if not isinstance(event, Call) or not _is_repeatable(memory, event, number, written):
            continue
        key = _key(memory, (event.function, event.args, dict(event.kwargs)))
        before = events[earlier := first_calls.setdefault(key, number)]
        operands = [_owner(memory, x) for x in _tensors((event.args, event.kwargs))]
        results = _results(memory, event)
        if any(earlier < write <= number for owner in operands for write in written[owner]):
            first_calls[key] = number
        elif isinstance(before, Call) and before is not event and not _is_output(results, events):
            left_out.add(number)
            for result, same in zip(results, _results(memory, before), strict=True):
                memory.replace(result, same)
    return left_out


def _is_output(results: Sequence[Temporary], events: Sequence[Event]) -> bool:
    return any(one.last == len(events) for one in results)


def _is_repeatable(
    memory: Memory, call: Call, number: int, written: dict[Owner, list[int]]
) -> bool:
    """Whether a call only returns new memory, that nothing writes later, and always the same."""
    function = call.function
    if (
        function.namespace != "aten"
        or function._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in function.tags
    ):
        return False
    results = _results(memory, call)
    tensors = [x for x in tree_leaves(call.results) if isinstance(x, Tensor)]
    return (
        len(results) == len(tensors) > 0
        and all(one.returned and one.first == number for one in results)
        and not any(write > number for one in results for write in written[one])
    )


def _results(memory: Memory, call: Call) -> list[Temporary]:
    places = [memory.find(x) for x in tree_leaves(call.results) if isinstance(x, Tensor)]
    return [place.temporary for place in places if isinstance(place, InTemporary)]


def _writes(memory: Memory, events: Sequence[Event]) -> dict[Owner, list[int]]:
    """The numbers of the events that may write what each owner holds."""
    written: dict[Owner, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        for x in _written(event):
            written[_owner(memory, x)].append(number)
    return written


def _written(event: Event) -> Iterator[Tensor]:
    """The tensors that an event may write: a kernel, all that it gets."""
    if not isinstance(event, Call):
        yield from _tensors((event.args, event.kwargs))
        return
    arguments = event.function._schema.arguments
    passed = dict(zip((argument.name for argument in arguments), event.args, strict=False))
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors((passed | dict(event.kwargs)).get(argument.name))


def _owner(memory: Memory, x: Tensor) -> Owner:
    place = memory.find(x)
    return place.temporary if isinstance(place, InTemporary) else None


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _key(memory: Memory, value: Any) -> Hashable:
    """Equal for equal arguments of ops."""
    if isinstance(value, Tensor):
        place = memory.find(value)
        where = value.data_ptr() if isinstance(place, Fixed) else place
        return where, value.dtype, *value.shape, None, *value.stride()
    if isinstance(value, dict):
        return tuple((name, _key(memory, value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return type(value), *(_key(memory, one) for one in value)
    return type(value), repr(value)
