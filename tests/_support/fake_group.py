"""Process groups without processes: graphs for several ranks, traced and run by one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from kernel_cases.rows import one_process_group
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

REGISTERED: dict[int, ProcessGroup] = {}
EQUAL: dict[str, ProcessGroup] = {}


def _registered(ranks: int) -> ProcessGroup:
    if ranks in REGISTERED:
        return REGISTERED[ranks]
    one_process_group()
    custom = ProcessGroup.BackendType.CUSTOM
    group = ProcessGroup(distributed.HashStore(), 0, ranks)
    group._set_default_backend(custom)
    backend = c10d.FakeProcessGroup._create_internal(0, ranks)
    group._register_backend(torch.device("cpu"), custom, backend)
    name: Any = f"{ranks} fake ranks"  # of a type that not all versions of torch have
    group._set_group_name(name)
    c10d._register_process_group(group.group_name, group)
    REGISTERED[ranks] = group
    return group


def fake_group(ranks: int) -> str:
    """The name of a group of so many ranks, of which this process is the first. A sum over it is
    what this process gives, and what it gathers is that of this process, repeated.
    """
    return _registered(ranks).group_name


class _EqualRanks(ProcessGroup):
    def allreduce(self, *args: Any, **options: Any) -> Any:
        tensors = args[0]
        for tensor in tensors:
            tensor.mul_(self.size())
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(tensors)
        create_work: Any = vars(c10d)["_create_work_from_future"]  # the stub lacks it
        return create_work(done)


def equal_ranks(ranks: int) -> str:
    """The name of a group of so many ranks which all give what this process gives: a sum over it is
    a multiple of that, so that a tensor that is not summed differs from one that is.
    """
    name: Any = f"{ranks} equal ranks"
    if name not in EQUAL:
        one_process_group()
        create: Any = _EqualRanks  # the stub lacks this form
        EQUAL[name] = create(0, ranks)
        EQUAL[name]._set_group_name(name)
        c10d._register_process_group(name, EQUAL[name])
    return str(name)


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Meanwhile this process has no groups, as a program has none when it starts. Later they have
    the names that they had.
    """
    if not distributed.is_initialized():
        yield
        return
    fakes = list(REGISTERED)
    distributed.destroy_process_group()
    REGISTERED.clear()
    EQUAL.clear()
    try:
        yield
    finally:
        one_process_group()
        for ranks in fakes:
            fake_group(ranks)
