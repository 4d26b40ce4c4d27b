"""atomc: a torch.compile backend that rewrites graphs of language models to hand-tuned kernels."""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ContractError": "atomc.errors",
    "LLM": "atomc.runtime.llm",
    "Options": "atomc.options",
    "OptionsError": "atomc.errors",
    "Report": "atomc.report.report",
    "Rewrite": "atomc.rewriting.rewrite",
    "RunError": "atomc.errors",
    "SamplingParams": "atomc.runtime.requests.sampling_params",
    "adopt": "atomc.quantization",
    "explain": "atomc.compiler.explain",
    "ops": "",
    "parallelize": "atomc.parallel.parallelize",
    "prepare": "atomc.prepare_model",
    "prepare_batching": "atomc.stock.batching",
    "quantize": "atomc.quantization",
    "register_experts": "atomc.stock.experts",
    "register_kernel": "atomc.ops.op",
    "register_pass": "atomc.compiler.pipeline",
    "reports": "atomc.report.report",
    "unprepare": "atomc.prepare_model",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that `import atomc` stays light (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'atomc' has no attribute {name!r}")
    module = _PUBLIC[name]
    imported = importlib.import_module(module or f"atomc.{name}")
    member = getattr(imported, name) if module else imported
    globals()[name] = member
    return member


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
