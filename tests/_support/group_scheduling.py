"""How pytest-xdist deals tests out: by groups, and a test without a group is one. By itself it
counts after each test over all groups that its worker has run: of twenty thousand tests, twenty
seconds in which both workers wait for the next one.
"""

from typing import Any

from xdist.scheduler.loadgroup import LoadGroupScheduling


class GroupScheduling(LoadGroupScheduling):
    """Forgets a group when its last test has run."""

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        group = self._split_scope(self.registered_collections[node][item_index])
        super().mark_test_complete(node, item_index, duration)
        groups = self.assigned_work[node]
        if all(groups[group].values()):
            del groups[group]
