"""Closes the objects of a JSON schema: properties that it does not name are forbidden.

A JSON schema is open by default, and a small model then writes further properties until its
maximum length. Backends of structured output therefore close it.
"""

from collections.abc import Iterator
from urllib.parse import unquote

from atomc.json_types import JSON, JSONObject

# Keywords whose values are a schema, a list of schemas, or an object of schemas: first those that
# apply to the same value, then those that apply to its parts or only define.
CONDITIONS, ALTERNATIVES = ("if", "then", "else"), ("anyOf", "oneOf")
SCHEMAS = ("items", "additionalProperties", "contains", "additionalItems", "unevaluatedItems")
LISTS = ("items", "prefixItems")
NAMING = ("properties", "patternProperties")
DEFINITIONS = ("$defs", "definitions")
# They say whether an object may have other properties.
RULES = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: JSONObject) -> None:
    """Set additionalProperties=False, in place, in each object that names properties and does not
    say whether it may have others.

    Schemas that apply to one object together (allOf, $ref beside properties, if) name a part of
    its properties each and stay open. So do those within `not`, and those that require a property
    that they do not name.
    """
    nodes = list(_walk(schema))
    combined = [node for node in nodes if _is_combined(node)]
    stay_open = {id(node) for node in combined}
    waiting = [part for node in combined for part in _applied_to_same_value(node, schema)]
    while waiting:
        node = waiting.pop()
        if id(node) not in stay_open:
            stay_open.add(id(node))
            waiting += _applied_to_same_value(node, schema)
    for node in nodes:
        if _names_all(node) and id(node) not in stay_open:
            node["additionalProperties"] = False


def _walk(schema: JSONObject) -> Iterator[JSONObject]:
    """This schema and those within it, without those within `not`."""
    waiting: list[JSON] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        waiting += [node.get(name) for name in (*CONDITIONS, *SCHEMAS)]
        for name in ("allOf", *ALTERNATIVES, *LISTS):
            waiting += _items(node.get(name))
        for name in ("dependentSchemas", *NAMING, *DEFINITIONS):
            waiting += _values(node.get(name))


def _names_all(node: JSONObject) -> bool:
    """Whether an object names all properties that it may have, by JSON Schema or by intent."""
    if not any(name in node for name in NAMING) or any(rule in node for rule in RULES):
        return False
    named = node.get("properties")
    required = _items(node.get("required"))
    return (
        "patternProperties" in node
        or not isinstance(named, dict)
        or all(name in named for name in required if isinstance(name, str))
    )


def _is_combined(node: JSONObject) -> bool:
    """Whether several schemas apply to one object."""
    parts = sum(name in node for name in (*ALTERNATIVES, "$ref"))
    parts += len(_items(node.get("allOf"))) + any(name in node for name in NAMING)
    return parts > 1 or any(name in node for name in (*CONDITIONS, "dependentSchemas"))


def _applied_to_same_value(node: JSONObject, schema: JSONObject) -> list[JSONObject]:
    """The schemas within this one, or named by its $ref, that apply to the same value."""
    parts = [node.get(name) for name in CONDITIONS]
    for name in ("allOf", *ALTERNATIVES):
        parts += _items(node.get(name))
    parts += _values(node.get("dependentSchemas"))
    parts.append(_target(node.get("$ref"), schema))
    return [part for part in parts if isinstance(part, dict)]


def _target(ref: JSON, schema: JSONObject) -> JSON:
    """What a $ref with a JSON pointer (RFC 6901) names; None for others."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node: JSON = schema
    for part in unquote(ref[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _items(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _values(value: JSON) -> list[JSON]:
    return list(value.values()) if isinstance(value, dict) else []
