"""Process groups without processes: graphs for several ranks, traced and run by one."""

import functools

import torch
from kernel_cases.rows import one_process_group
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup


@functools.cache
def _registered(ranks: int) -> ProcessGroup:
    one_process_group()
    custom = ProcessGroup.BackendType.CUSTOM
    group = ProcessGroup(distributed.HashStore(), 0, ranks)
    group._set_default_backend(custom)
    backend = c10d.FakeProcessGroup._create_internal(0, ranks)
    group._register_backend(torch.device("cpu"), custom, backend)
    group._set_group_name(f"{ranks} fake ranks")
    c10d._register_process_group(group.group_name, group)
    return group


def fake_group(ranks: int) -> str:
    """The name of a group of so many ranks, of which this process is the first. A sum over it is
    what this process gives, and what it gathers is that of this process, repeated.
    """
    return _registered(ranks).group_name
