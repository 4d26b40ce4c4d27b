"""Process groups of torch.distributed by their names, as functional collectives take them."""

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group


def process_group(name: str) -> ProcessGroup:
    """Raises the error of torch.distributed for an unknown group."""
    return _resolve_process_group(name)
