"""Which compiled graphs repeat what their earlier calls launched."""

from collections.abc import Sequence

from atomc import kernels
from atomc.ops.op import REGISTRY
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.records import INLINE
from atomc.report.report import Report


def repeats_calls(
    options: Options, platform: Platform, report: Report, syncing: Sequence[str]
) -> bool:
    """Whether later calls repeat what the first ones launched: on an NVIDIA GPU and on a CPU, if
    all launches are seen and nothing else watches the calls.

    syncing  kernels for which the host reads tensors; on a CPU no recording shows that
    """
    providers = {kernel.chosen for kernel in report.kernels} - {INLINE}
    settings = (options.audit, options.record, options.inductor.get("cpp_wrapper"))
    wanted = options.repeat and not any(settings)
    seen = platform.is_cuda or (platform.is_cpu and not syncing)
    return wanted and seen and providers <= set(kernels.VISIBLE)


def repeats_steps(
    options: Options, platform: Platform, report: Report, syncing: Sequence[str]
) -> bool:
    """Whether the steps of an engine repeat earlier ones of the same sizes: on an NVIDIA GPU, in
    one process, for all others would have to repeat the same steps.
    """
    if not platform.is_cuda or syncing or not repeats_calls(options, platform, report, syncing):
        return False
    ops = [REGISTRY[kernel.op] for kernel in report.kernels if kernel.op in REGISTRY]
    return all(op.sent is None for op in ops)
