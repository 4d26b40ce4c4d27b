"""What happened to one graph, as records, and the reasons that follow from them. Reports as text,
HTML and JSON: atomc.report.report.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar

from atomc.errors import suggestion
from atomc.report.audit_findings import AuditFindings
from atomc.report.records import (
    CacheOutcome,
    FusionOpportunity,
    Glue,
    GraphBreak,
    KernelChoice,
    Miss,
    MoeLayer,
    OpCost,
    QuantizedWeightSize,
    Site,
    Stage,
    counted,
    spans,
)


class Machine(TypedDict, total=False):
    """The machine of a compile. measured: the bandwidth was measured, it has no data sheet."""

    name: str
    arch: str
    device: str
    bandwidth: float | None
    flops: float | None
    measured: bool


class RepeatedCall(TypedDict):
    """Calls of one kind that run without their Python: what each of them launches, how much of it
    CUDA's driver and cuBLASLt get directly, the bytes of the allocation of its temporaries, and ms
    of the host for the first of them.
    """

    kernels: int
    ops: int
    direct: int
    bytes: int
    host_ms: float


Place = TypeVar("Place", Site, Miss)
RUNTIME = "in the runtime (atomc.LLM, atomc serve, atomc explain --runtime)"


@dataclass
class ReportData:
    """What happened to one graph from Dynamo. Contains no tensors.

    continues  the line of the user's file behind which the graph begins, of one that follows a
             graph break
    call     equal for the graphs that one call of a compiled function made
    matches  rewrite -> number of sites where it fired, also if a later rewrite consumed the result
    phases   seconds: lift, trace, passes, lower, glue, kernels (that glue does not hide)
    """

    model: str
    treated: bool = False
    why_not: str = ""
    matches: Counter[str] = field(default_factory=Counter)
    sites: list[Site] = field(default_factory=list)
    kernels: list[KernelChoice] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    # Of each: sizes, or "inputs": the shapes of its copied inputs; and "bytes".
    cuda_graphs: list[dict[str, int | list[list[int]]]] = field(default_factory=list)
    repeated: list[RepeatedCall] = field(default_factory=list)
    machine: Machine = field(default_factory=Machine)
    cached: CacheOutcome = field(default_factory=CacheOutcome)
    notes: list[str] = field(default_factory=list)
    glue: list[Glue] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    graph_break: GraphBreak | None = None
    continues: str = ""
    call: int = 0
    recompile: str | None = None
    near: list[Miss] = field(default_factory=list)
    off: list[str] = field(default_factory=list)  # passes that are disabled
    optional: list[str] = field(default_factory=list)  # those of them that no option enables
    known: list[str] = field(default_factory=list)  # every rewrite that could have fired
    # Passes that only the runtime has: they need a paged cache.
    runtime_only: list[str] = field(default_factory=list)
    # Rewrite -> the op it needs that is not in the graph.
    absent: dict[str, str] = field(default_factory=dict)
    # Rewrite -> the rewrite that consumed its ops.
    taken: dict[str, str] = field(default_factory=dict)
    # Rewrite -> earlier passes whose ops it matches.
    requires: dict[str, list[str]] = field(default_factory=dict)
    num_ops: dict[str, int] = field(default_factory=dict)  # ops left in the graph before lowering
    costs: list[OpCost] = field(default_factory=list)  # of the graph before lowering, in its order
    savings: list[FusionOpportunity] = field(default_factory=list)
    few_bits: list[QuantizedWeightSize] = field(default_factory=list)
    moe: list[MoeLayer] = field(default_factory=list)  # mixtures of experts
    about: dict[str, str] = field(default_factory=dict)  # rewrite -> the docstring of its file
    audit: AuditFindings = field(default_factory=AuditFindings)  # of the first call, if requested
    # Of the matcher: rejections that it could not explain.
    bugs: list[str] = field(default_factory=list)

    @property
    def cache(self) -> str:
        """The outcome of the cache: "hit", or the reason for a miss."""
        return str(self.cached)

    @property
    def layers(self) -> list[int]:
        """The numbers of the repeated layers in the graph."""
        return sorted({cost.layer for cost in self.costs if cost.layer is not None})

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def title(self) -> str:
        """The model, and where the graph begins if not at the start of its function."""
        return f"{self.model}, behind {self.continues}" if self.continues else self.model

    def misses(self, rewrite: str) -> list[Miss]:
        """The near misses of this rewrite. Raises ValueError for a rewrite that does not exist."""
        self._check(rewrite)
        return [miss for miss in self.near if miss.rewrite == rewrite]

    def why(self, rewrite: str, module_path: str | None = None) -> str:
        """Why the rewrite fired or did not, in the whole graph or below one module.

        One of: pass off; only in the runtime; graph not treated; no anchor; near miss; taken by
        another rewrite; weights are quantized; broken here; fired, but a kernel refused; fired. Of
        an op that no rewrite makes: its kernels. Raises ValueError for any other name.
        """
        everywhere = rewrite in self.off or not self.treated
        place = f" below {module_path}" if module_path and not everywhere else ""
        return f"{rewrite}{place}: {self.reason(rewrite, module_path)}"

    def reason(self, rewrite: str, module_path: str | None = None) -> str:
        """As `why`, without the names of rewrite and module."""
        if rewrite in self.runtime_only and rewrite not in self.known:
            return f"exists only {RUNTIME}: it needs a paged KV cache"
        nodes = [choice for choice in self.kernels if choice.op == rewrite]
        if nodes and not self._exists(rewrite):
            return f"an op that no rewrite makes, {len(nodes)} nodes{_kernels_text(nodes)}"
        self._check(rewrite)
        if rewrite in self.optional:
            return f"off by default; on with options={{'passes': {{{rewrite!r}: True}}}}"
        if rewrite in self.off:
            return f"the pass is off (options={{'passes': {{{rewrite!r}: False}}}})"
        if not self.treated:
            return f"the graph was not treated: {self.why_not}"
        sites = _places(self.sites, rewrite, module_path)
        near = _places(self.near, rewrite, module_path)
        if sites:
            fired = f"fired at {_sites_text([site.layer for site in sites])}"
            return fired + _kernels_text(nodes) + _disabled_text(near)
        if near:
            return _near_text(near)
        nothing = self.absent.get(rewrite, "nothing like it is in this part of the graph")
        return self._prevented(rewrite, module_path) or f"no anchor: {nothing}"

    def cannot_apply(self, rewrite: str) -> bool:
        """Whether a treated graph has nothing that the rewrite, which is on, could match."""
        off = rewrite in (*self.off, *self.optional)
        near = any(miss.rewrite == rewrite for miss in self.near)
        return not (off or near or self.matches[rewrite]) and not self._prevented(rewrite, None)

    def _prevented(self, rewrite: str, module_path: str | None) -> str:
        """What kept a rewrite without sites and near misses from firing; "" if nothing did."""
        forms = [
            form
            for form in self.few_bits
            if form.form_of == rewrite and _below(form.module_path, module_path)
        ]
        if forms:
            return self._quantized(forms)
        if rewrite in self.taken:
            return self.taken[rewrite]
        paths = [
            *(cost.module_path for cost in self.costs),
            *(site.module_path for site in self.sites),
            *(miss.module_path for miss in self.near),
        ]
        if not any(_below(path, module_path) for path in paths) and paths:
            return f"no op of this graph is in a module {module_path!r}"
        if self.graph_break is not None:
            return (
                f"broken here: Dynamo ended the graph at {self.graph_break.source} "
                f"({self.graph_break.code}): {self.graph_break.summary}"
            )
        for earlier in self.built_on(rewrite):
            upstream = _places(self.near, earlier, module_path)
            if upstream:
                return (
                    f"needs {earlier}, which did not fire everywhere. Near miss: "
                    f"{upstream[0].text()}"
                )
        return ""

    def _quantized(self, forms: Sequence[QuantizedWeightSize]) -> str:
        """That these ops stand for the one that a rewrite makes, and what runs them."""
        names = " and ".join(dict.fromkeys(form.op for form in forms))
        nodes = {form.node for form in forms}
        kernels = _kernels_text([choice for choice in self.kernels if choice.node in nodes])
        sites = _sites_text([form.layer for form in forms])
        return f"the weights are quantized: {names} at {sites}{kernels}"

    def built_on(self, rewrite: str) -> list[str]:
        """The passes that this one requires, directly or indirectly, nearest first."""
        passes = [rewrite]
        for name in passes:
            passes += [earlier for earlier in self.requires.get(name, []) if earlier not in passes]
        return passes[1:]

    def _exists(self, rewrite: str) -> bool:
        return rewrite in (*self.known, *self.off) or bool(self.matches[rewrite])

    def _check(self, rewrite: str) -> None:
        if not self.known or self._exists(rewrite):
            return
        from atomc.ops import REGISTRY  # imports torch, which a process that shows reports does not

        names = sorted(self.known)
        if rewrite in REGISTRY:
            where = f"it may be one {RUNTIME}; " if self.runtime_only else ""
            raise ValueError(
                f"{rewrite!r} is no rewrite but an op, which this graph does not have; {where}"
                f"rewrites are {', '.join(names)}"
            )
        raise ValueError(
            f"no rewrite {rewrite!r}{suggestion(rewrite, names)}; rewrites are {', '.join(names)}"
        )


def _sites_text(layers: Sequence[int | None]) -> str:
    """The number of sites and their layers, of the layer of each site."""
    numbered = spans(layer for layer in layers if layer is not None)
    where = f" in layers {numbered}" if numbered else ""
    return f"{len(layers)} site{'s' * (len(layers) > 1)}{where}"


def _kernels_text(choices: Sequence[KernelChoice]) -> str:
    """What runs these ops, and the kernels that refused."""
    counts = Counter(choice.chosen for choice in choices)
    refused = {refusal for choice in choices for refusal in choice.refused}
    text = ""
    if counts:
        text += f"; runs as {counted(dict(counts.most_common()))}"
    if refused:
        text += "; refused: " + "; ".join(
            f"{provider}: {reason}" for provider, reason in sorted(refused)
        )
    return text


def _disabled_text(near: Sequence[Miss]) -> str:
    """The sites at which an option disables the rewrite."""
    off = [miss for miss in near if miss.kind == "off"]
    return f"; {off[0].found} and at {len(off)} sites in all" if off else ""


def _near_text(near: Sequence[Miss]) -> str:
    """The first of the near misses, and the number of others."""
    first = near[0]
    more = f" (and {len(near) - 1} more like it)" if len(near) > 1 else ""
    return (
        f"{first.found}{more}"
        if first.kind in ("taken", "off")
        else f"near miss{more}: {first.text()}"
    )


def _places(places: Iterable[Place], rewrite: str, module_path: str | None) -> list[Place]:
    """The sites or near misses of a rewrite, below one module unless it is None."""
    return [x for x in places if x.rewrite == rewrite and _below(x.module_path, module_path)]


def _below(path: str, prefix: str | None) -> bool:
    return (
        prefix is None
        or path == prefix
        or path.startswith(prefix + ".")
        or f".{prefix}." in f".{path}."
    )
