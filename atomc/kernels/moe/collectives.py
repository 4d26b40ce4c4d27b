"""Collectives of torch.distributed that return before they are done.

fp8 travels as bytes, because not every backend of torch.distributed knows it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed

Pending = Callable[[], Tensor]


class Ranks:
    """The processes of a group. Raises ValueError where torch.distributed has no group.

    group  None: all processes
    """

    def __init__(self, part: str, group: distributed.ProcessGroup | None) -> None:
        if not distributed.is_available() or not distributed.is_initialized():
            raise ValueError(
                f"{part} sends over torch.distributed, which has no process group: call "
                "torch.distributed.init_process_group first, or use no_ep"
            )
        chosen = distributed.group.WORLD if group is None else group
        assert chosen is not None
        self.group_name = chosen.group_name
        self.size = distributed.get_world_size(chosen)
        self.rank = distributed.get_rank(chosen)

    def all_gather(self, x: Tensor) -> Tensor:
        """x [N, ...], of one shape on all ranks -> [ranks * N, ...]. Waits."""
        send = x.contiguous()
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            send, self.size, self.group_name
        )
        return self._pending(gathered, send, x.dtype)()

    def all_to_all(
        self, x: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Pending:
        """The rows that all ranks send to this one, by rank. x [N, ...]: sent[r] rows for rank r,
        by rank; None: the same number for each.
        """
        equal = [len(x) // self.size] * self.size
        send = _bytes(x)
        return self._pending(
            torch.ops._c10d_functional.all_to_all_single(
                send, list(received or equal), list(sent or equal), self.group_name
            ),
            send,
            x.dtype,
        )

    @staticmethod
    def _pending(receiving: Tensor, sending: Tensor, dtype: torch.dtype) -> Pending:
        in_use = [sending]  # a backend may read it, in a thread of its own, until wait returns

        def wait() -> Tensor:
            received: Tensor = torch.ops._c10d_functional.wait_tensor(receiving)
            in_use.clear()
            return received.view(dtype)

        return wait


def _bytes(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
