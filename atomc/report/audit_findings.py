"""The findings of an audit, as a report stores them and `--json` writes them: see docs/audit.md."""

from typing import TypedDict

# Values of option `passes`: False disables a rewrite everywhere, a list in these modules.
Passes = dict[str, bool | list[str]]


class ErrorRow(TypedDict):
    """As atomc.audit.error.Error."""

    max_abs: float
    relative: float
    sqnr: float | None


class SiteRow(ErrorRow):
    """One site: the errors of its kernel and of the original nodes against fp32.

    rewrites  the rewrites whose results it absorbed, then its own
    against   see atomc.audit.compare_kernels.SiteErrors
    passes    disables the rewrite at this site, {} if no option can
    """

    rewrite: str
    rewrites: list[str]
    op: str
    kernel: str
    module_path: str
    layer: int | None
    source: str
    against: str
    original: ErrorRow
    passes: Passes


class OutputErrors(TypedDict):
    """Relative errors of the graph's outputs against fp32, and the bound on `compiled`."""

    compiled: float
    kernels: float
    original: float
    bound: float


class Blame(TypedDict):
    """The cause of a difference.

    rewrite      "" if the difference remains with all rewrites disabled
    module_path  of the single site that causes it; None if one site alone is not the cause
    places       the number of sites of the rewrite
    runs         the number of runs of the graph to find it
    passes       the option that disables it, {} if there is none
    """

    rewrite: str
    module_path: str | None
    places: int
    runs: int
    passes: Passes


class AuditFindings(TypedDict, total=False):
    """All of them, empty without an audit.

    sites    largest error first
    outputs  if the graph computes them from the start of a sequence
    blame    if they exceed the bound
    """

    sites: list[SiteRow]
    notes: list[str]
    outputs: OutputErrors
    blame: Blame
    seconds: float
