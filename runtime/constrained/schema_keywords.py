"""Brings the keywords of a JSON schema into the form that llguidance accepts."""

from collections.abc import Callable

from atomc.files.json_types import JSON, JSONObject
from atomc.runtime.constrained.closed_schema import walk

# Keywords of which null is a value: any JSON value is.
ANY_VALUE = ("const", "default")


def adapt_keywords(schema: JSONObject, knows_format: Callable[[str], bool]) -> None:
    """Remove from each schema, in place, null, which some clients send for a keyword that is not
    set, and the formats that llguidance does not know: a format is an annotation.
    """
    for node in list(walk(schema)):
        for name, value in list(node.items()):
            unset = value is None and name not in ANY_VALUE
            if unset or (name == "format" and isinstance(value, str) and not knows_format(value)):
                del node[name]


def check_num_properties(schema: JSONObject) -> None:
    """Raises ValueError for an object that could have fewer properties than minProperties:
    llguidance counts a name that the output repeats twice, unless the schema names it.
    """
    for node in walk(schema):
        least, required = node.get("minProperties"), node.get("required")
        if not isinstance(least, int) or not _has_unnamed(node):
            continue
        names = {name for name in _items(required) if isinstance(name, str)}
        if least > len(names) + 1:
            raise ValueError(
                f"json_schema: minProperties is {least}, expected at most {len(names) + 1} (one "
                "more than the required properties) in an object whose other properties are not "
                "named in `properties`"
            )


def _has_unnamed(node: JSONObject) -> bool:
    """Whether an object may have properties that the schema does not name."""
    return bool(node.get("patternProperties")) or node.get("additionalProperties") is not False


def _items(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []
