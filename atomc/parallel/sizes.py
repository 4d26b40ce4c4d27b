"""Which numbers of ranks divide a model."""

from collections.abc import Mapping

from atomc.json_types import JSONLike


def check(config: Mapping[str, JSONLike], size: int) -> None:
    """Raise ValueError, with the sizes that would work, if the model of this config.json cannot be
    cut into `size` parts.
    """
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads") if isinstance(text, Mapping) else None
    if isinstance(heads, int) and heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"{heads} heads do not divide by {size}; {fitting} do")
