"""Bugs in the scan of Mamba-2, and in how layers of transformers' classes are entered."""

from mutations import Bug

SCAN = "tests/ops/test_ssm_scan.py"
MODELS = "tests/models/test_mamba_models.py"


def triton(old: str, new: str, tests: str = f"{SCAN} -k padding_of_any_value") -> Bug:
    return Bug("atomc/kernels/triton/recurrent/ssm.py", old, new, tests)


def in_torch(old: str, new: str, tests: str = f"{SCAN} -k steps_of_any_size") -> Bug:
    return Bug("atomc/kernels/torch/ssm.py", old, new, tests)


BUGS = [
    triton("inside & (begins == 0), 0.0", "inside, 0.0"),
    triton("elif ALL_ROWS & (start == end):", "elif False:"),
    triton("if end - start > few:", "if end - start > few + 16:"),
    triton(
        "tl.where(there, _step_sizes(dt, bias, DT_MIN, DT_MAX), 0.0)",
        "_step_sizes(dt, bias, DT_MIN, DT_MAX)",
    ),
    triton(
        "state * tl.exp(tl.sum(a * step))",
        "state",
        "tests/kernels/test_kernels.py -k 'ssm_scan_update-triton-long'",
    ),
    triton(
        "tl.minimum(step, DT_MAX)",
        "step",
        "tests/kernels/test_kernels.py -k 'ssm_scan_update-triton-limits'",
    ),
    in_torch("* total.exp()", "* 1.0"),
    in_torch("state * total[..., -1:, :].exp()", "state"),
    in_torch("if end - start > 1:", "if end - start > 3:"),
    in_torch(".tril(-1).cumsum(-2)", ".tril().cumsum(-2)"),
    Bug("atomc/ops/ssm.py", "steps.clamp(dt_min, dt_max)", "steps", f"{SCAN} -k steps_of_any_size"),
    Bug("atomc/stock/mamba.py", "F.silu(z)", "z", f"{MODELS} -k same_logits"),
    Bug("atomc/stock/mamba.py", "x * mixer.ssm_in_multiplier", "x", f"{MODELS} -k same_logits"),
    Bug("atomc/stock/short_conv.py", "before * inputs", "before", f"{MODELS} -k same_logits"),
    Bug(
        "atomc/stock/replaced_forwards.py",
        "if not apart <= TOLERANCE:",
        "if apart > 1e9:",
        f"{MODELS} -k refused_with_the_difference",
    ),
    Bug(
        "atomc/stock/replaced_forwards.py",
        "unsupported = bool(rest) or any(named.get(name) is not None for name in OWN)",
        "unsupported = False",
        f"{MODELS} -k runs_as_its_class",
    ),
    Bug(
        "atomc/stock/replaced_forwards.py",
        "(mask is not None and not kind.masks)",
        "False",
        f"{MODELS} -k runs_as_its_class",
    ),
    Bug(
        "atomc/stock/adapter.py",
        "== layer_types.count(SHORT_CONV)",
        ">= 0",
        f"{MODELS} -k nothing_was_entered_for",
    ),
]
