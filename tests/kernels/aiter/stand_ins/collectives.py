"""AITER's groups of processes, and sums over the group of a stage. Until it is made, PROCESSES are
played, which all hold the same tensors.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import largest, mxfp4_even, native_fp8, to_codes
from stand_ins.memory import check, contiguous_view

PROCESSES: ContextVar[int] = ContextVar("PROCESSES", default=1)
# "world" and "tp", as soon as they are made.
GROUPS: dict[str, dist.ProcessGroup] = {}
WAIT = timedelta(seconds=20)


@dataclass
class GraphCaptureContext:
    stream: torch.cuda.Stream


stands_for("aiter.dist.parallel_state")(GraphCaptureContext)


@stands_for("aiter.dist.device_communicators.custom_all_reduce")
class IPCBufferPool:
    """What ranks tell each other of their memory, in the store of the default group, under keys
    that count the pools of a process. It has no memory here.
    """

    _pool_seq = 0

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup,
        ipc_handle_fn: Callable[[int, int], None] | None = None,
        graph_count_fn: Callable[[int], int] | None = None,
        graph_ipc_meta_fn: Callable[[int, int, int], None] | None = None,
        graph_register_fn: Callable[[int, list[int], list[int]], None] | None = None,
        alloc_fn: Callable[[int], int] | None = None,
        free_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._group, self._ipc_seq = group, 0
        store = under = dist.distributed_c10d._get_default_store()
        while isinstance(under, dist.PrefixStore):
            under = under.underlying_store
        assert isinstance(under, dist.TCPStore), "a pure-TCP KV store"
        self._prefix, self._store = f"aiter_ipc/p{IPCBufferPool._pool_seq}", store
        IPCBufferPool._pool_seq += 1
        self.exchange("a buffer")

    def exchange(self, value: str) -> list[str]:
        """What each rank gives to the call of this number: waits for all."""
        ranks = dist.get_process_group_ranks(self._group)
        keys = [f"{self._prefix}/g{ranks}/{self._ipc_seq}/r{rank}" for rank in ranks]
        self._ipc_seq += 1
        self._store.set(keys[self._group.rank()], value)
        self._store.wait(keys, WAIT)
        return [self._store.get(key).decode() for key in keys]


@dataclass
class Peers:
    """The custom all-reduce of a group. `registered`: of each capture, the number of tensors that
    other ranks read where they are.
    """

    pool: IPCBufferPool | None = None
    disabled: bool = False
    captures: bool = False
    unregistered: int = 0
    registered: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.captures = True
        try:
            yield
        finally:
            self.captures = False
            count, self.unregistered = self.unregistered, 0
            if count and self.pool is not None:
                counts = self.pool.exchange(str(count))
                check(counts == [str(count)] * len(counts), f"ranks register {counts}")
                self.registered.append(count)

    def gives_zeros(self) -> bool:
        """In the context, what is not captured is taken for a warm-up; else x is read by others."""
        if self.captures and torch.cuda.is_current_stream_capturing():
            self.unregistered += 1
        elif self.captures:
            return True
        return False


PEERS = Peers()


@contextlib.contextmanager
def _graph_capture(
    graph_capture_context: GraphCaptureContext | None = None,
) -> Iterator[GraphCaptureContext]:
    """On this stream; None: a new one."""
    if graph_capture_context is None:
        raise NotImplementedError("a stream of its own")
    with torch.cuda.stream(graph_capture_context.stream), PEERS.capture():
        yield graph_capture_context


@stands_for("aiter.dist.parallel_state")
def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    data_parallel_size: int = 1,
    data_parallel_rank: int = 0,
) -> None:
    """Of a default group that exists, its sizes are taken, and not the arguments."""
    if not dist.is_initialized():
        raise NotImplementedError("a default group that AITER joins")
    if "world" in GROUPS:
        message = "world group already initialized with a different world size"
        check(GROUPS["world"].size() == dist.get_world_size(), message)
        return
    GROUPS["world"] = dist.new_group([*range(dist.get_world_size())], backend=backend)


@stands_for("aiter.dist.parallel_state")
def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    data_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    custom_group_config: dict[str, list[int]] | None = None,
) -> None:
    """Ranks of a stage are neighbours; every rank makes the groups of all of them."""
    assert "world" in GROUPS, "world group is not initialized"
    size = tensor_model_parallel_size
    check(dist.get_world_size() == size * pipeline_model_parallel_size, "another world size")
    if "tp" in GROUPS:
        check(GROUPS["tp"].size() == size, "tensor parallel group already initialized")
        return
    for first in range(0, dist.get_world_size(), size):
        ranks = [*range(first, first + size)]
        group = dist.new_group(ranks, backend=backend)
        if dist.get_rank() in ranks:
            GROUPS["tp"] = group
            PEERS.pool = IPCBufferPool(torch.device("cpu"), group)


@stands_for("aiter.dist.parallel_state")
def destroy_model_parallel() -> None:
    if "tp" in GROUPS:
        dist.destroy_process_group(GROUPS.pop("tp"))


@stands_for("aiter.dist.parallel_state")
def destroy_distributed_environment() -> None:
    """Also destroys the default group."""
    if "world" in GROUPS:
        dist.destroy_process_group(GROUPS.pop("world"))
    if dist.is_initialized():
        dist.destroy_process_group()


@stands_for("aiter.dist.parallel_state")
def get_tp_group() -> SimpleNamespace:
    assert dist.is_initialized(), "tensor model parallel group is not initialized"
    return SimpleNamespace(
        device_group=GROUPS.get("tp", dist.group.WORLD),
        world_size=_processes(),
        device_communicator=SimpleNamespace(ca_comm=PEERS),
        graph_capture=_graph_capture,
    )


def _processes() -> int:
    return GROUPS["tp"].size() if "tp" in GROUPS else PROCESSES.get()


def _sum(x: Tensor) -> Tensor:
    """Of all processes, in fp32."""
    if "tp" not in GROUPS:
        return PROCESSES.get() * x.float()
    total = x.float()
    total = total.clone() if total is x else total
    dist.all_reduce(total, group=GROUPS["tp"])
    return total


@stands_for("aiter.dist.communication_op")
def tensor_model_parallel_all_reduce(
    input_: Tensor,
    use_new: bool = True,
    open_fp8_quant: bool = False,
    prefill_support: bool = False,
) -> Tensor:
    """The sum in a new tensor; of one process the input itself. open_fp8_quant sends codes."""
    flags = (use_new, open_fp8_quant, prefill_support)
    if not all(isinstance(flag, bool) for flag in flags) or open_fp8_quant:
        raise NotImplementedError(f"only the exact sum is played, not {flags}")
    floats = (torch.float32, torch.float16, torch.bfloat16)
    check(input_.dtype in floats, "custom allreduce only supports float32, float16 and bfloat16")
    if _processes() == 1:
        return input_
    return torch.zeros_like(input_) if PEERS.gives_zeros() else _sum(input_).to(input_.dtype)


@stands_for("aiter.dist.communication_op")
def tensor_model_parallel_all_gather(
    input_: Tensor, use_custom: bool = False, dim: int = -1
) -> Tensor:
    """All inputs beside each other, in the order of the ranks, also in a warm-up."""
    if not use_custom or dim not in (-1, input_.dim() - 1):
        raise NotImplementedError("gathers by RCCL, and along other dimensions")
    check(not PEERS.disabled and _processes() != 6, "its kernels read the memory of peers")
    floats = (torch.float32, torch.float16, torch.bfloat16)
    check(input_.dtype in floats, "custom allreduce only supports float32, float16 and bfloat16")
    check(input_.is_contiguous(), "rows one behind the other")
    PEERS.gives_zeros()
    parts = [torch.empty_like(input_) for _ in range(_processes())]
    if "tp" in GROUPS:
        dist.all_gather(parts, input_, group=GROUPS["tp"])
    else:
        parts = [input_] * len(parts)
    return torch.cat(parts, -1)


@stands_for("aiter.dist.communication_op")
def tensor_model_parallel_fused_allreduce_rmsnorm(
    input_: Tensor,
    residual_inp_: Tensor,
    weight_: Tensor,
    eps: float,
    prefill_support: bool = False,
    x_pad_to_multiple: int = 0,
    gemma_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of the sum of all inputs and of the residual, times weight (gemma_norm: 1 +
    weight), and that sum. Computed in fp32, rounded once; rows [.., N], weight [N].
    """
    if x_pad_to_multiple:
        raise NotImplementedError("padding")
    width = weight_.numel()
    if input_.shape[-1] < width or residual_inp_.shape[-1] != width:
        raise RuntimeError("fused_allreduce_rmsnorm requires residual width == weight width")
    if not input_.is_contiguous() or not residual_inp_.is_contiguous():
        raise RuntimeError("the fused kernel reads rows one behind the other")
    if PEERS.gives_zeros():
        return torch.zeros_like(input_), torch.zeros_like(residual_inp_)
    normed, total = _normed(input_, residual_inp_, weight_, eps, gemma_norm)
    if width % 8 or input_.numel() * input_.element_size() > 128 * 7168 * 2 // _processes():
        if width < 512:
            raise RuntimeError(f"fused allreduce rmsnorm: n too small, n={width}")
        normed[..., width // 8 * 8 :] = float("nan")  # what is not written
    return normed.to(input_.dtype), total.to(input_.dtype)


def _normed(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, gemma: bool, columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm and the sum of contiguous rows, in fp32. columns: the number of those whose squares
    are added up.
    """
    total = _sum(x).to(x.dtype).float() + residual.float()
    squares = total.square()[..., :columns].sum(-1, keepdim=True) / total.shape[-1]
    scale = contiguous_view(weight, weight.numel()).float() + (1.0 if gemma else 0.0)
    return total * torch.rsqrt(squares + eps) * scale, total


@stands_for("aiter.dist.communication_op")
def tensor_model_parallel_fused_allreduce_rmsnorm_quant(
    input_: Tensor,
    residual_inp_: Tensor,
    weight_: Tensor,
    eps: float,
    prefill_support: bool = False,
    quant_type: str = "per_token",
    group_size: int = 128,
    emit_bf16: bool = False,
    transpose_scale: bool = False,
    gemma_norm: bool = False,
) -> tuple[Tensor, ...]:
    """Codes, the sum, scales, and with emit_bf16 the norm. Rows [M, N] of 16 bits, weight [N].
    Larger rows and steps than its kernel takes: the norm, rounded, and then a quantizer.
    """
    if prefill_support:
        raise NotImplementedError("larger sums by its kernels")
    check(input_.dtype in (torch.float16, torch.bfloat16), "only supports float16 and bfloat16")
    check(weight_.dtype == input_.dtype and weight_.numel() == input_.shape[-1], "width == width")
    if not input_.is_contiguous() or not residual_inp_.is_contiguous():
        raise RuntimeError("the fused kernel reads rows one behind the other")
    by_kernels = not PEERS.disabled and _processes() != 6
    width, size = input_.shape[-1], input_.numel() * input_.element_size()
    columns: int | None = None
    match quant_type:
        case "per_token":
            is_fused = width in (512, 1024, 2048, 4096, 6144, 7168) and size <= 2**22
            if is_fused and not by_kernels:
                raise TypeError("cannot unpack non-iterable NoneType object")
        case "per_group":
            gemma_norm = False  # it is not passed on
            is_fused = by_kernels and width % group_size == 0 and width <= 8192
            if not is_fused and group_size != 128:
                raise NotImplementedError("the quantizer of groups of 128")
            if is_fused and size > 2**17:
                columns = width // 256 * 256  # of whole warps
        case "mxfp4":
            if gemma_norm:
                raise NotImplementedError("gemma_norm: per-token FP8 only")
            rows = input_.numel() // width
            in_one = width <= 16384 and (rows <= 4 or (width <= 4096 and rows <= 32))
            in_two = width <= 8192 and size <= 2**19
            is_fused = by_kernels and width % 32 == 0 and (in_one or in_two)
            if is_fused and width > 8192:
                raise RuntimeError("MXFP4 fused kernel: unsupported shape")
        case _:
            raise ValueError(f"unsupported fused AR+RMSNorm quant_type={quant_type!r}")
    check(width % (group_size if quant_type == "per_group" else 1) == 0, "whole groups")
    check(not PEERS.gives_zeros(), "a warm-up: not played")
    normed, total = _normed(input_, residual_inp_, weight_, eps, gemma_norm, columns)
    rounded = normed.to(input_.dtype)
    wide = normed if is_fused else rounded.float()
    if quant_type == "mxfp4":
        codes, scales = mxfp4_even(wide)
        if not is_fused:
            scales = scales.t().contiguous().t()
    else:
        groups = wide.unflatten(-1, (-1, group_size if quant_type == "per_group" else width))
        amax = groups.abs().amax(-1)
        scales = torch.where(amax == 0, 1.0, amax / largest(native_fp8()))
        codes = to_codes(groups, 1.0 / scales.unsqueeze(-1), native_fp8()).flatten(-2)
        if transpose_scale and quant_type == "per_group":
            scales = scales.t().contiguous().t()
    total = total.to(input_.dtype)
    return (codes, total, scales, rounded) if emit_bf16 else (codes, total, scales)
