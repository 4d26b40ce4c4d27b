"""The ranges of token counts in which a node has one kernel."""

from collections.abc import Callable, Iterable

from atomc.report.records import KernelChoice, OpCost
from atomc.token_range import Tokens


def choices_by_op(choices: Iterable[KernelChoice]) -> Callable[[OpCost], list[KernelChoice]]:
    """What gives the choices for an op, in order of tokens: those for its nodes, and those for what
    some ranges have in their place.
    """
    by_name: dict[str, list[KernelChoice]] = {}
    for choice in choices:
        for name in choice.made_of or [choice.node]:
            by_name.setdefault(name, []).append(choice)

    def of_op(cost: OpCost) -> list[KernelChoice]:
        names = dict.fromkeys((*cost.nodes, *cost.made_of))
        of_names = {id(choice): choice for name in names for choice in by_name.get(name, ())}
        return sorted(of_names.values(), key=lambda choice: Tokens.of(choice.tokens).first)

    return of_op


def kernels_by_tokens(choices: Iterable[KernelChoice]) -> list[tuple[str, str]]:
    """(range of tokens, provider) of the choices for one node, in order of tokens; neighbouring
    ranges of one kernel are one. Other kernels of a provider refuse other things.
    """
    groups: list[list[KernelChoice]] = []
    for choice in choices:
        last = groups[-1][-1] if groups else None
        if last and (last.chosen, last.refused) == (choice.chosen, choice.refused):
            groups[-1].append(choice)
        else:
            groups.append([choice])
    ranges = []
    for group in groups:
        first, last_range = Tokens.of(group[0].tokens).first, Tokens.of(group[-1].tokens).last
        tokens = group[0].tokens if len(group) == 1 else str(Tokens(first, last_range))
        ranges.append((tokens, group[0].chosen))
    return ranges
