"""Bugs in what other programs rely on: vLLM's plugin, the name of the model in a request,
and what LLM says of a module that it cannot call.
"""

from mutations import Bug

PLUGIN = "tests/compiler/test_vllm_plugin.py -k"

BUGS = [
    Bug(
        "runtime/execution/views/user_module.py",
        "logits.dim() != 2 or len(logits) != num_rows",
        "logits.dim() != 2",
        "tests/stock/test_refused_models.py -k llm_cannot_call",
    ),
    Bug(
        "runtime/execution/views/user_module.py",
        "signature.bind(None, None, None)",
        "pass",
        "tests/stock/test_refused_models.py -k llm_cannot_call",
    ),
    Bug(
        "atomc/vllm_plugin.py",
        "if compilation.backend != BACKEND:\n            return",
        "",
        f"{PLUGIN} defaults",
    ),
    Bug("atomc/vllm_plugin.py", "of_platform(vllm_config)", "pass", f"{PLUGIN} defaults"),
    Bug(
        "atomc/vllm_plugin.py",
        "return is_compiling() and variance_size is None and same",
        "return variance_size is None and same",
        f"{PLUGIN} no_op_for",
    ),
    Bug(
        "atomc/vllm_plugin.py",
        "if PROVIDER in ir.ops.rms_norm.impls:\n            return",
        "",
        f"{PLUGIN} defaults",
    ),
    Bug(
        "atomc/vllm_plugin.py",
        "if compilation.cudagraph_mode is None:\n                ",
        "if True:\n                ",
        f"{PLUGIN} mode_2",
    ),
    Bug(
        "atomc/vllm_plugin.py",
        'os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")',
        "pass",
        f"{PLUGIN} mode_2",
    ),
    Bug(
        "runtime/server/service/model_info.py",
        "if name is not None and name not in self.names and name not in self.adapters:",
        "if name not in self.names and name not in self.adapters:",
        "tests/runtime/server/test_server_fields.py -k all_names",
    ),
]
