"""The passes that were added from outside, each with the name of the one that it stands before, or
None: at the end.

A list of its own, so that whoever asks whether there are any need not import the pipeline.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atomc.rewriting.graph_pass import Pass

REGISTERED: "list[tuple[Pass, str | None]]" = []
