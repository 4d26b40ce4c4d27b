"""All parts of the modular kernel that this project or others have, and what became of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from atomc.kernels.moe.all_to_all import AllToAll
from atomc.kernels.moe.combinations.batched_all_to_all import BatchedAllToAll
from atomc.kernels.moe.combinations.batched_reference import BatchedReference
from atomc.kernels.moe.combinations.flashinfer import FlashInfer
from atomc.kernels.moe.combinations.mori import Mori
from atomc.kernels.moe.combinations.naive_batched import NaiveBatched
from atomc.kernels.moe.combinations.no_ep import NoEP
from atomc.kernels.moe.combinations.reference import Reference
from atomc.kernels.moe.combinations.triton_batched import TritonBatched
from atomc.kernels.moe.dispatched import ActivationFormat
from atomc.kernels.moe.experts import ExpertsKernel
from atomc.kernels.moe.grouped import Grouped
from atomc.kernels.moe.modular_experts import incompatible
from atomc.kernels.moe.prepare_finalize import PrepareFinalize
from atomc.kernels.moe.schemes import ALL_SCHEMES
from atomc.kernels.moe.triton_standard import Triton

Kind = Literal["prepare", "experts"]
STANDARD, BATCHED = ActivationFormat.STANDARD, ActivationFormat.BATCHED


@dataclass(frozen=True)
class PreparePart:
    """make(expert_map, max_tokens_per_rank) -> the part; the map may be None only if `alone`.

    alone  it needs no process group
    """

    part: type[PrepareFinalize]
    make: Callable[[Tensor, int], PrepareFinalize]
    note: str
    alone: bool


@dataclass(frozen=True)
class ExpertsPart:
    part: type[ExpertsKernel]
    note: str


@dataclass(frozen=True)
class RefusedPart:
    """A part of others that has no adapter, and the reason."""

    name: str
    kind: Kind
    formats: tuple[ActivationFormat, ...]
    reason: str


PREPARE = {
    entry.part.name: entry
    for entry in (
        PreparePart(
            NoEP, lambda expert_map, _: NoEP(expert_map), "one rank; no communication", True
        ),
        PreparePart(
            AllToAll,
            lambda expert_map, _: AllToAll(expert_map),
            "tokens travel to the ranks of their experts (torch.distributed)",
            False,
        ),
        PreparePart(
            Mori,
            lambda expert_map, tokens: Mori(expert_map, max_tokens_per_rank=tokens),
            "tokens travel to the ranks of their experts (amd-mori, GPUs of one host); called by "
            "value only so far, not run on a GPU",
            False,
        ),
        PreparePart(
            BatchedReference,
            lambda expert_map, tokens: BatchedReference(expert_map, max_tokens_per_rank=tokens),
            "one rank; reorders tokens by expert, without communication",
            True,
        ),
        PreparePart(
            BatchedAllToAll,
            lambda expert_map, tokens: BatchedAllToAll(expert_map, max_tokens_per_rank=tokens),
            "batches of fixed size travel, for few tokens (torch.distributed)",
            False,
        ),
    )
}
EXPERTS = {
    entry.part.name: entry
    for entry in (
        ExpertsPart(Reference, "references of the ops, one expert after another; any device"),
        ExpertsPart(Grouped, "`torch.nn.functional.grouped_mm` over rows sorted by expert"),
        ExpertsPart(Triton, "grouped products in Triton over blocks of rows of one expert"),
        ExpertsPart(
            FlashInfer,
            "one fused kernel of CUTLASS on NVIDIA GPUs from sm90 on (flashinfer-python); called "
            "by value only so far, not run on a GPU",
        ),
        ExpertsPart(NaiveBatched, "one expert after another; any device"),
        ExpertsPart(TritonBatched, "batched products in Triton that skip unused rows"),
    )
}

_DEEP_EP = (
    "not adapted: deep-ep 1.0.0 on PyPI is a source archive that does not build without NVSHMEM"
)
_DEEP_GEMM = (
    "not adapted: deep-gemm 1.0.0 on PyPI lacks the CUDA headers that it compiles at run time"
)
REFUSED = {
    entry.name: entry
    for entry in (
        RefusedPart("deepep_high_throughput", "prepare", (STANDARD,), _DEEP_EP),
        RefusedPart("deepep_low_latency", "prepare", (BATCHED,), _DEEP_EP),
        RefusedPart("pplx", "prepare", (BATCHED,), "not adapted: there is no package to install"),
        RefusedPart(
            "flashinfer_cutlass_dispatch",
            "prepare",
            (STANDARD,),
            "not adapted: flashinfer sends through multi-node NVLink memory (MNNVL), which single "
            "hosts of H100 and H200 lack",
        ),
        RefusedPart("deep_gemm", "experts", (STANDARD,), _DEEP_GEMM),
        RefusedPart("batched_deep_gemm", "experts", (BATCHED,), _DEEP_GEMM),
        RefusedPart(
            "triton_or_deep_gemm",
            "experts",
            (STANDARD,),
            "not adapted: without deep_gemm there is nothing to choose from",
        ),
        RefusedPart(
            "batched_triton_or_deep_gemm",
            "experts",
            (BATCHED,),
            "not adapted: without batched_deep_gemm there is nothing to choose from",
        ),
        RefusedPart(
            "cutlass_fp8",
            "experts",
            (STANDARD, BATCHED),
            "not adapted: flashinfer's kernel takes one scale for all activations, and the scheme "
            "fp8 has one per row",
        ),
        RefusedPart(
            "cutlass_fp4",
            "experts",
            (STANDARD, BATCHED),
            "not adapted: flashinfer's kernel for NVFP4 is for sm100, and no scheme of experts has "
            "activations in NVFP4",
        ),
    )
}


def names(kind: Kind) -> list[str]:
    """Those that are here, then the refused ones."""
    here = [*PREPARE] if kind == "prepare" else [*EXPERTS]
    return here + [part.name for part in REFUSED.values() if part.kind == kind]


def why_not(prepare: str, experts: str, scheme: str) -> str | None:
    """Why two parts of the table cannot be combined, as a sentence; or None.

    Raises ValueError for a name that is not in the table.
    """
    for kind, name, known in (
        ("prepare", prepare, names("prepare")),
        ("experts", experts, names("experts")),
    ):
        if name not in known:
            raise ValueError(f"there is no {kind} part {name!r}: choose from {', '.join(known)}")
    if scheme not in ALL_SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(ALL_SCHEMES)}")
    for name in (prepare, experts):
        if name in REFUSED:
            return f"{name} is {REFUSED[name].reason}"
    return incompatible(PREPARE[prepare].part, EXPERTS[experts].part, scheme)
