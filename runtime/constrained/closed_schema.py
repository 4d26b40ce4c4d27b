"""Closes the objects of a JSON schema: properties that it does not name are forbidden.

A JSON schema is open by default, and a small model then writes further properties until its
maximum length. Backends of structured output therefore close it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple
from urllib.parse import unquote

from atomc.files.json_types import JSON, JSONObject

# Keywords whose values are a schema, a list of schemas, or an object of schemas: first those that
# apply to the same value, then those that apply to its parts or only define.
CONDITIONS, ALTERNATIVES = ("if", "then", "else"), ("anyOf", "oneOf")
SCHEMAS = ("items", "additionalProperties", "contains", "additionalItems", "unevaluatedItems")
LISTS = ("items", "prefixItems")
NAMING = ("properties", "patternProperties")
DEFINITIONS = ("$defs", "definitions")
# Those with schemas for properties, and for items.
OBJECTS = (*NAMING, "additionalProperties")
ARRAYS = ("items", "prefixItems", "contains", "additionalItems", "unevaluatedItems")
# They say whether an object may have other properties.
RULES = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: JSONObject) -> None:
    """Set additionalProperties=False, in place, in each object that names properties and does not
    say whether it may have others.

    Schemas that apply to one object together (allOf, $ref beside properties, if) name a part of
    its properties each and stay open, and so do the schemas that they have for one property or
    item. So do those within `not`, and those that require a property that they do not name.
    """
    nodes = list(walk(schema))
    references = References(schema, nodes)
    waiting = [[node] for node in nodes if _is_combined(node)]
    waiting += [_schemas_of(node, NAMING) for node in nodes if all(key in node for key in NAMING)]
    stay_open: set[int] = set()
    seen: set[frozenset[int]] = set()
    while waiting:
        applied = list(_applied_together(waiting.pop(), references))
        group = frozenset(id(each.node) for each in applied)
        if group not in seen:
            seen.add(group)
            stay_open |= group
            waiting += _combined_parts(applied)
    for node in nodes:
        if _names_all(node) and id(node) not in stay_open:
            node["additionalProperties"] = False


def walk(schema: JSONObject) -> Iterator[JSONObject]:
    """This schema and those within it, without those within `not`."""
    waiting: list[JSON] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        waiting += [node.get(name) for name in (*CONDITIONS, *SCHEMAS)]
        for name in ("allOf", *ALTERNATIVES, *LISTS):
            waiting += as_list(node.get(name))
        for name in ("dependentSchemas", *NAMING, *DEFINITIONS):
            waiting += _values(node.get(name))


def _names_all(node: JSONObject) -> bool:
    """Whether an object names all properties that it may have, by JSON Schema or by intent."""
    if not any(name in node for name in NAMING) or any(rule in node for rule in RULES):
        return False
    named = node.get("properties")
    required = as_list(node.get("required"))
    return (
        "patternProperties" in node
        or not isinstance(named, dict)
        or all(name in named for name in required if isinstance(name, str))
    )


def _is_combined(node: JSONObject) -> bool:
    """Whether several schemas apply to one object."""
    parts = sum(name in node for name in (*ALTERNATIVES, "$ref"))
    parts += len(as_list(node.get("allOf"))) + any(name in node for name in NAMING)
    return parts > 1 or any(name in node for name in (*CONDITIONS, "dependentSchemas"))


class Applied(NamedTuple):
    """A schema that applies to a value. choices: (list of alternatives, place), by id, for each
    choice that it depends on.
    """

    node: JSONObject
    choices: frozenset[tuple[int, int]]

    def excludes(self, other: "Applied") -> bool:
        """Whether both never apply together: they are of different alternatives."""
        mine = dict(self.choices)
        return any(mine.get(of, place) != place for of, place in other.choices)


def _applied_together(roots: Iterable[JSONObject], references: "References") -> Iterator[Applied]:
    """Schemas that apply to one value, and those within them, or named by their $ref, that apply
    to the same value.
    """
    waiting = deque(Applied(root, frozenset()) for root in roots)
    seen: set[int] = set()
    while waiting:
        node, choices = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield Applied(node, choices)
        parts = [node.get(name) for name in CONDITIONS] + as_list(node.get("allOf"))
        parts += _values(node.get("dependentSchemas"))
        parts.append(references.target(node.get("$ref")))
        # Before alternatives: a schema may be applied in any case, and in one of them.
        waiting.extendleft(Applied(part, choices) for part in parts if isinstance(part, dict))
        for alternatives in map(as_list, map(node.get, ALTERNATIVES)):
            waiting.extend(
                Applied(part, choices | {(id(alternatives), place)})
                for place, part in enumerate(alternatives)
                if isinstance(part, dict)
            )


def _combined_parts(applied: Sequence[Applied]) -> Iterator[list[JSONObject]]:
    """Of schemas that apply to one value, those that apply together to a property or item of it."""
    objects = [each for each in applied if any(key in each.node for key in OBJECTS)]
    if any(_has_patterns(each.node) for each in objects):
        names: list[tuple[Applied, list[JSONObject]]] = [
            (each, _schemas_of(each.node, OBJECTS)) for each in objects
        ]
        yield from _together(names)
    else:
        by_name: defaultdict[str, list[tuple[Applied, list[JSONObject]]]] = defaultdict(list)
        for each in objects:
            properties = each.node.get("properties")
            for name, part in properties.items() if isinstance(properties, dict) else ():
                if isinstance(part, dict):
                    by_name[name].append((each, [part]))
        for parts in by_name.values():
            yield from _together(parts)
    yield from _together([(each, _schemas_of(each.node, ARRAYS)) for each in applied])


def _together(parts: Sequence[tuple[Applied, list[JSONObject]]]) -> Iterator[list[JSONObject]]:
    """All parts, if those of two schemas may apply together."""
    pairs = combinations([each for each, values in parts if values], 2)
    if any(not one.excludes(other) for one, other in pairs):
        yield [part for _, values in parts for part in values]


def _has_patterns(node: JSONObject) -> bool:
    """Whether it has a schema for properties that another one may name."""
    return "patternProperties" in node or isinstance(node.get("additionalProperties"), dict)


def _schemas_of(node: JSONObject, keys: Iterable[str]) -> list[JSONObject]:
    """The schemas for parts of a value under these keywords."""
    values: list[JSON] = []
    for key in keys:
        value = node.get(key)
        if key in NAMING:
            values += _values(value)
        else:
            values += value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, dict)]


class References:
    """What the $ref of a schema name: JSON pointers (RFC 6901), $anchor, and $id."""

    def __init__(self, schema: JSONObject, nodes: Iterable[JSONObject]) -> None:
        self._schema = schema
        self._named: dict[str, JSONObject] = {}
        for node in nodes:
            for key, prefix in (("$id", ""), ("$anchor", "#")):
                name = node.get(key)
                if isinstance(name, str):
                    # A relative $id, or one in a $ref, is known by its last part.
                    self._named.setdefault(prefix + name.rstrip("#").rpartition("/")[2], node)

    def target(self, ref: JSON) -> JSON:
        """None for one that is not in the schema."""
        if not isinstance(ref, str):
            return None
        base, _, fragment = ref.partition("#")
        node: JSON = self._named.get(base.rpartition("/")[2]) if base else self._schema
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"#{fragment}")
        for part in unquote(fragment).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name)
            elif isinstance(node, list) and name.isdecimal() and len(name) < 6:
                node = node[int(name)] if int(name) < len(node) else None
            else:
                return None
        return node


def as_list(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _values(value: JSON) -> list[JSON]:
    return list(value.values()) if isinstance(value, dict) else []
