"""vLLM's general plugin, which vLLM loads in each of its processes:

    vllm serve MODEL --compilation-config '{"mode": 2, "backend": "atom"}'

vLLM calls its own kernels with every backend but Inductor, and those are opaque to a compiler. With
this plugin and this backend, norms call atomc's ops, and rotations and activations are computed in
PyTorch, which atomc recognizes. Attention stays vLLM's op. Other backends see no change.
"""

import logging
import os
from typing import Any

log = logging.getLogger("atomc")
BACKEND = PROVIDER = "atom"


def register() -> None:
    """Add atomc's norms to vLLM's, and the defaults of a config with this backend. Does nothing the
    second time, and with a vLLM that has other interfaces, where it logs a warning.
    """
    try:
        from vllm import ir
        from vllm.platforms import current_platform

        if PROVIDER in ir.ops.rms_norm.impls:
            return
        _add_norms(ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
        _add_defaults(current_platform)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        log.warning(
            "this vLLM does not take atomc's norms (%s): with the backend atom it needs "
            '"custom_ops": ["none"] in --compilation-config, and norms stay as they are; tested '
            "is the interface of vLLM 0.24",
            error,
        )


def _add_norms(rms_norm: Any, fused_add_rms_norm: Any) -> None:
    """Names, types and defaults of parameters are those of vLLM's, which compares them."""
    from torch import Tensor

    def takes(weight: Tensor | None, dtype: object, variance_size: int | None) -> bool:
        """Whether atomc has an op for it; uncompiled, an op would only run its reference."""
        from torch.compiler import is_compiling

        same = weight is not None and weight.dtype == dtype
        return is_compiling() and variance_size is None and same

    def takes_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return takes(weight, x.dtype, variance_size)

    def takes_add_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        return takes(weight, x.dtype, variance_size) and x_residual.dtype == x.dtype

    @rms_norm.register_impl(PROVIDER, supports_args=takes_norm)  # type: ignore[untyped-decorator]
    def norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        from atomc import ops

        assert weight is not None, "takes_norm"
        return ops.rms_norm(x, weight, epsilon)

    @fused_add_rms_norm.register_impl(PROVIDER, supports_args=takes_add_norm)  # type: ignore[untyped-decorator]
    def add_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        from atomc import ops

        assert weight is not None, "takes_add_norm"
        return ops.add_rms_norm(x, x_residual, weight, epsilon)


def _add_defaults(platform: Any) -> None:
    """Have the platform's defaults of a config with this backend be PyTorch and atomc's norms, and
    in mode 2 CUDA graphs of decode steps. What a user has set stays.
    """
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    of_platform = platform.apply_config_platform_defaults

    def apply_config_platform_defaults(vllm_config: Any) -> None:
        of_platform(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.backend != BACKEND:
            return
        if not {"all", "none"} & set(compilation.custom_ops):
            compilation.custom_ops.append("none")
        priority = vllm_config.kernel_config.ir_op_priority
        for name in ("rms_norm", "fused_add_rms_norm"):
            if not getattr(priority, name):
                setattr(priority, name, [PROVIDER])
        if compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE:
            # The default captures pieces of a graph, which only mode 3 has: that would be none.
            if compilation.cudagraph_mode is None:
                compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            # vLLM stores what it compiles ahead of time; atomc's function cannot be stored.
            os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

    platform.apply_config_platform_defaults = apply_config_platform_defaults
