"""The indexer of sparse attention as torch calls, on any device."""

from atomc import ops
from atomc.kernels.torch.eager import eager

index_topk = eager(ops.index_topk, __name__)
chosen_mask = eager(ops.chosen_mask, __name__)
index_write = eager(ops.index_write, __name__, layout="paged")
paged_index_topk = eager(ops.paged_index_topk, __name__, layout="paged")
