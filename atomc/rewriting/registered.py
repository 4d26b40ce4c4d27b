"""Registered passes, each with the name of the pass that it comes before; None: at the end.

A separate module, so that reading the list does not import the pipeline.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atomc.rewriting.graph_pass import Pass

REGISTERED: "list[tuple[Pass, str | None]]" = []
