"""Counts the bytes of storages on the CPU that are alive, from the operations of a block."""

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedBytes(TorchDispatchMode):
    """Of storages that exist when it is made or are made inside: `held()` now, and `peak` after any
    operation inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        gc.collect()
        for item in gc.get_objects():
            if isinstance(item, Tensor):
                self._add(item)
        self.before = self.peak = self.held()

    def _add(self, item: Any) -> None:
        strided = type(item) in (Tensor, torch.nn.Parameter) and item.layout == torch.strided
        if strided and item.device.type == "cpu":
            storage = item.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in tree_leaves(made):
            self._add(item)
        self.peak = max(self.peak, self.held())
        return made

    def held(self) -> int:
        total = 0
        for key, ref in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)  # None: it is freed
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total
