"""Bugs in rewrites: what they require of a graph, and what they put in its place."""

from mutations import Bug

PAIRS = "tests/passes/test_norm_pair.py"
STATIC = "tests/passes/test_static_cache.py"
MERGED = "tests/passes/test_merge.py"
SHARED = "tests/passes/test_shared_expert.py"
SENT = "tests/passes/test_quantizers_before_dispatch.py"
QUANTIZED = "tests/passes/test_quant_fusion.py"
ADDED = "tests/passes/test_norm_add.py"
IN_PLACE = "tests/passes/test_reinplace.py"
ROUTES = "tests/passes/test_moe_recognition.py"
DELTA = "tests/kernels/recurrent/test_conv_delta_rule.py"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"atomc/passes/{file}.py", old, new, tests)


BUGS = [
    # two norms of one product
    bug("fuse/norm_pair", "(2, 3, 5) if", "(2, 3, 4) if", PAIRS),
    bug("fuse/norm_pair", "swapped = _quantizes(second) and not", "swapped = False and not", PAIRS),
    bug("fuse/norm_pair", "*(_QUANTIZER if both else ())", "*(_QUANTIZER if False else ())", PAIRS),
    bug("fuse/norm_pair", "not same_sizes(x.shape[:-1], y.shape[:-1])", "False", PAIRS),
    # a norm and an add
    bug("fuse/norm_add", 'and call(reader).attrs.get("alpha", 1) == 1', "", ADDED),
    bug("fuse/norm_add", "or len(node.users) != 1", "", ADDED),
    bug("fuse/norm_add", "eps, sum_eps, style", "sum_eps, eps, style", ADDED),
    # quantizers that move
    bug(
        "fuse/quantizers_before_views",
        'not here.attrs.get("column_major_scales")',
        "True",
        QUANTIZED,
    ),
    bug(
        "fuse/quantizers_before_views",
        "known_equal(before.shape[-1], after.shape[-1])",
        "True",
        QUANTIZED,
    ),
    bug("fuse/quantizers_before_dispatch", "or len(tokens.users) > 1", "", SENT),
    bug(
        "fuse/quantizers_before_dispatch",
        'return None if isinstance(scale, Node) and scale.op != "placeholder" else sent',
        "return sent",
        SENT,
    ),
    # a static cache
    bug(
        "fuse/static_cache",
        "writer is not None and writer <",
        "writer is not None and writer >",
        STATIC,
    ),
    bug("fuse/static_cache", "and not _is_written(counter, site)", "", STATIC),
    bug("fuse/static_cache", '{**queries, "x": None} == {**keys, "x": None}', "True", STATIC),
    bug("fuse/static_cache", "any(reader < site.values for", "any(False for", STATIC),
    bug(
        "fuse/static_cache",
        "{*k.users, *source.users} - {source} != {write, site.keys}",
        "False",
        STATIC,
    ),
    bug("fuse/static_cache", "and keys.args[2] is values.args[2]", "", STATIC),
    # linear layers of one input
    bug("merge/linears", "if len(argument.users) > 1:", "if False:", MERGED),
    bug("merge/linears", "layer_of(module_path(node)), present", "present", MERGED),
    bug(
        "merge/linears", "key=lambda linear: gated.index", "key=lambda linear: -gated.index", MERGED
    ),
    bug("merge/linears", "if differing:", "if False:", MERGED),
    # a shared expert
    bug("merge/shared_expert", "weights, [0, 1], 1.0)", "weights, [0, 1], 0.0)", SHARED),
    bug(
        "merge/shared_expert", '["ids"], [0, 1], experts)', '["ids"], [0, 1], experts - 1)', SHARED
    ),
    # counters, and inputs that are written in place
    bug("merge/counters", "last_reader[counter] is node", "True", "tests/passes/test_counters.py"),
    bug("merge/counters", "[node.args[1], value", "[0, value", "tests/passes/test_counters.py"),
    bug(
        "reinplace",
        "if _last_reader(target, copy, position) > position[new]:",
        "if False:",
        IN_PLACE,
    ),
    # routers
    bug("recognize/route", "gather is not None or biased,", "gather is not None,", ROUTES),
    bug("recognize/route", "biased = biased and gather is not None", "biased = biased", ROUTES),
    bug("recognize/route", "in_order=in_order,", "in_order=False,", ROUTES),
    bug("recognize/route", 'any("sum" in step for', 'any("mul" in step for', ROUTES),
    bug("recognize/route", "scale=scale,\n", "scale=1.0,\n", ROUTES),
    bug("recognize/route", "groups=max(router.groups, 1)", "groups=1", ROUTES),
    # a convolution, gates and a delta rule
    bug("fuse/conv_delta_rule", "if len(state.users) > 1:", "if False:", DELTA),
    bug("fuse/conv_delta_rule", "if outside:", "if False:", DELTA),
    bug("fuse/conv_delta_rule", "if rule[name] is not convolution[name]:", "if False:", DELTA),
    bug("fuse/conv_delta_rule", "!= (-1, start, 1)", '!= (-1, attrs["start"], 1)', DELTA),
    bug("fuse/conv_delta_rule", "if sources[0] is not sources[1]:", "if False:", DELTA),
    # state of the runtime
    bug(
        "bind_state",
        "group=pagings.index(site.spec.paging)",
        "group=0",
        "tests/models/test_shared_keys.py tests/runtime/test_runtime.py",
    ),
    bug(
        "expert_load",
        "- record_of(node).shared_experts",
        "",
        "tests/runtime/execution/test_expert_load.py",
    ),
]
