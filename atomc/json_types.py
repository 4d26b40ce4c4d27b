"""Types of JSON values."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

# What json.loads returns.
JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
# What can be converted to JSON, without copying lists and mappings of subtypes.
JSONLike: TypeAlias = (
    "bool | int | float | str | Sequence[JSONLike] | Mapping[str, JSONLike] | None"
)
JSONObject: TypeAlias = "dict[str, JSON]"
