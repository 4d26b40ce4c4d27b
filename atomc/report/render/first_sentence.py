"""The first sentence of a docstring."""

import re


def first_sentence(text: str) -> str:
    """Of the first paragraph, without its line breaks."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0]
