"""Bugs in the calls of flash-linear-attention, and in where it may be called."""

from mutations import Bug

RULE, LIBRARY = "atomc/kernels/fla/delta_rule.py", "atomc/kernels/fla/library.py"
VALUES = "tests/kernels/recurrent/test_fla.py -k rule_is_that"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/kernels/recurrent/test_fla.py -k '{tests}'")


BUGS = [
    Bug(RULE, "q=_batch(q, 2)", "q=_batch(k, 2)", VALUES),
    Bug(RULE, "k=_batch(k, 2)", "k=_batch(q, 2)", VALUES),
    Bug(RULE, "g=_batch(g, 1)", "g=_batch(g.exp(), 1)", VALUES),
    Bug(RULE, "g=_batch(g, 1)", "g=_batch(beta, 1)", VALUES),
    Bug(RULE, "beta=_batch(beta, 1)", "beta=_batch(g, 1)", VALUES),
    Bug(RULE, "        scale=scale,\n", "", VALUES),
    Bug(RULE, "use_qk_l2norm_in_kernel=True", "use_qk_l2norm_in_kernel=False", VALUES),
    Bug(RULE, "x.reshape(-1, *x.shape[-dims - 1 :])", "x.reshape(1, -1, *x.shape[-dims:])", VALUES),
    bug(RULE, "v.shape[-3] <= STEPS", "v.shape[-3] < STEPS", "few_tokens_are"),
    bug(RULE, "v.shape[-3] <= STEPS", "v.shape[0] <= STEPS", "few_tokens_are"),
    bug(RULE, "unlike(HALVES, q=q, k=k, v=v)", "unlike(FLOATS, q=q, k=k, v=v)", "dtypes_that"),
    bug(RULE, "unlike(HALVES, q=q, k=k, v=v)", "unlike(HALVES, q=q, k=k)", "dtypes_that"),
    bug(RULE, "k.shape[-1], MAX_KEY", "v.shape[-1], MAX_KEY", "wide_keys"),
    bug(LIBRARY, 'if "fla" not in platform.asked:', "if False:", "on_request or default_compile"),
    bug(LIBRARY, "(platform.capability or OLDEST_GPU) < OLDEST_GPU", "False", "on_request"),
    bug(LIBRARY, "if TorchVersion(version) < OLDEST:", "if version < OLDEST:", "version_with"),
    bug(LIBRARY, "if argument not in parameters", "if False", "version_with"),
]  # fmt: skip
