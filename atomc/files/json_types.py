"""Types of JSON values, and their names in messages."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

# What json.loads returns.
JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
# What can be converted to JSON, without copying lists and mappings of subtypes.
JSONLike: TypeAlias = (
    "bool | int | float | str | Sequence[JSONLike] | Mapping[str, JSONLike] | None"
)
JSONMapping: TypeAlias = Mapping[str, JSONLike]
JSONObject: TypeAlias = "dict[str, JSON]"

# In the order in which they are checked: bool is an int, str a sequence.
_KINDS = (
    (bool, "a boolean"),
    (int | float, "a number"),
    (str, "a string"),
    (Sequence, "a list"),
    (Mapping, "an object"),
)


def json_kind(value: JSONLike) -> str:
    """The JSON type of the value, with its article."""
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")
