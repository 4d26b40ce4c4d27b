"""Process groups of torch.distributed by their names, as functional collectives take them."""

from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

_c10d: Any = distributed_c10d
# Raises the error of torch.distributed for an unknown group.
process_group: Callable[[str], ProcessGroup] = _c10d._resolve_process_group
