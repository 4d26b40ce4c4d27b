"""What a kernel says against arguments, as the sentence that a user reads."""

from typing import Any

from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform


def refusal_text(kernel: Kernel, platform: Platform, arguments: dict[str, Any]) -> str | None:
    found = refusal(kernel, platform, arguments)
    return None if found is None else found.text
