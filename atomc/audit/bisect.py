"""Finds the rewrite that causes a numerical difference, by bisection over the rewrites in the order
in which they ran.
"""

from collections.abc import Callable, Collection, Sequence

from atomc.audit.sites import AuditSite
from atomc.report.audit_findings import Blame, Passes

# These cannot be disabled: the runtime needs state to be bound, and every op must be lowered.
REQUIRED = ("bind_state", "lower")


def bisect_rewrites(
    run: Callable[[Sequence[AuditSite]], float],
    ranked: Sequence[AuditSite],
    order: Sequence[str],
    bound: float,
    known: Collection[str] = (),
) -> Blame:
    """Find the first rewrite with which the difference exceeds the bound.

    run     the difference without these sites; with all sites it exceeds the bound
    ranked  all sites, largest own error first
    order   their rewrites, in the order in which they ran
    known   the names of all passes

    Takes at most log2(len(order)) + 2 runs, the last to check whether the worst site alone is the
    cause.
    """
    few, many, runs = 0, len(order), 0  # the first `many` rewrites exceed the bound
    while few < many:
        middle = (few + many) // 2
        runs += 1
        if run([site for site in ranked if site.rewrite in order[middle:]]) > bound:
            many = middle
        else:
            few = middle + 1
    if not many:
        return Blame(rewrite="", module_path=None, places=0, runs=runs, passes={})
    rewrite = order[many - 1]
    sites = [site for site in ranked if site.rewrite == rewrite]
    alone = len(sites) == 1 or run(sites[:1]) <= bound
    path = sites[0].module_path if alone else None
    return Blame(
        rewrite=rewrite,
        module_path=path,
        places=len(sites),
        runs=runs + (len(sites) > 1),
        passes=disabling_option(sites[0], path, known),
    )


def disabling_option(site: AuditSite, path: str | None, known: Collection[str]) -> Passes:
    """The value of option `passes` that disables the rewrite of a site, in one module or
    everywhere; {} if none can.
    """
    if site.rewrite in REQUIRED:
        return {}
    # An op that is not lifted is recognised again by its own pass.
    names = [site.rewrite, *([site.op] if site.rewrite == "lift" and site.op in known else [])]
    return {name: False if path is None else [path] for name in names}
