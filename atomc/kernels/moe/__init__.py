"""Mixtures of experts composed of replaceable parts; docs/moe.md describes them.

moe = ModularExperts(NoEP(), Grouped())
y = moe(x, ids, weights, ExpertWeights(w13, w2))
"""

from atomc.kernels.moe.all_to_all import AllToAll
from atomc.kernels.moe.combinations.batched_all_to_all import BatchedAllToAll
from atomc.kernels.moe.combinations.batched_reference import BatchedReference
from atomc.kernels.moe.combinations.flashinfer import FlashInfer
from atomc.kernels.moe.combinations.mori import Mori
from atomc.kernels.moe.combinations.naive_batched import NaiveBatched
from atomc.kernels.moe.combinations.no_ep import NoEP
from atomc.kernels.moe.combinations.reference import Reference
from atomc.kernels.moe.combinations.triton_batched import TritonBatched
from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Sizes, WorkspaceShapes
from atomc.kernels.moe.grouped import Grouped
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights, RankExperts
from atomc.kernels.moe.modular_experts import ModularExperts, incompatible
from atomc.kernels.moe.prepare_finalize import PrepareFinalize
from atomc.kernels.moe.schemes import SCHEMES, Fp8PerBlock, Fp8PerToken, Int8PerToken, Unquantized
from atomc.kernels.moe.triton_standard import Triton
from atomc.kernels.moe.weight_and_reduce import WeightAndReduce

__all__ = [
    "SCHEMES",
    "ActivationFormat",
    "AllToAll",
    "BatchedAllToAll",
    "BatchedReference",
    "Dispatched",
    "ExpertWeights",
    "ExpertsConfig",
    "ExpertsKernel",
    "FlashInfer",
    "Fp8PerBlock",
    "Fp8PerToken",
    "Grouped",
    "Int8PerToken",
    "ModularExperts",
    "Mori",
    "NaiveBatched",
    "NoEP",
    "PrepareFinalize",
    "RankExperts",
    "Reference",
    "Sizes",
    "Triton",
    "TritonBatched",
    "Unquantized",
    "WeightAndReduce",
    "WorkspaceShapes",
    "incompatible",
]
