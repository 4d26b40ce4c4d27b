"""The rows of tensors of state per sequence: what each is for."""

from dataclasses import dataclass

SPARE_SLOTS = 1  # for padding


@dataclass(frozen=True)
class StateRows:
    """The rows, in this order: a slot for each running sequence, one for padding, one for each slot
    that keeps the state before a draft, and the snapshots.

    rewinds   whether there are rows for the state before a draft
    """

    slots: int
    rewinds: bool = False
    snapshots: int = 0

    @property
    def total(self) -> int:
        return self.first_snapshot + self.snapshots

    @property
    def first_snapshot(self) -> int:
        return self.slots + SPARE_SLOTS + (self.slots if self.rewinds else 0)

    def row_before_draft(self, slot: int) -> int:
        """The row that keeps the state of this slot before its draft."""
        assert self.rewinds, "there are no rows for states before drafts"
        return self.slots + SPARE_SLOTS + slot
