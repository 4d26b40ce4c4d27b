"""A stage on which AITER's real code can be imported, interpreted, compiled and run without ROCm
and without its GPU.

Three things are played: the command-line tools of ROCm that AITER asks for the architecture, the
one compiled module that it calls while it is imported, and the driver from which Triton learns what
it compiles for.
"""

import enum
import importlib
import importlib.util
import os
import stat
import sys
import types
from pathlib import Path

TOOLS = {
    "rocminfo": "#!/bin/sh\necho '*******'\necho '  Name:                    {arch}'\n"
    "echo '  Device Type:             GPU'\necho '  Compute Unit:            {units}'\n",
    "hipconfig": "#!/bin/sh\necho 7.0.0\n",
    "hipcc": "#!/bin/sh\necho 7.0.0\n",
}
TABLES = (
    "GEMM_BF16",
    "GEMM_A8W8",
    "GEMM_A8W8_BPRESHUFFLE",
    "GEMM_A8W8_BLOCKSCALE",
    "GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
    "GEMM_A4W4",
    "A8W8_BATCHED_GEMM",
    "BF16_BATCHED_GEMM",
    "FMOE",
)
UNITS = {"gfx942": 304, "gfx950": 256}
# What launches say to AMD's compiler, and NVIDIA's does not know.
AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint")
# Of csrc/include/aiter_enum.h; AITER reads the enums of its compiled module while it is imported.
ENUMS = {
    "ActivationType": {"No": -1, "Silu": 0, "Gelu": 1, "Swiglu": 2, "Situv2": 3},
    "QuantType": {
        "No": 0,
        "per_Tensor": 1,
        "per_Token": 2,
        "per_1x32": 3,
        "per_1x128": 4,
        "per_128x128": 5,
        "per_256x128": 6,
        "per_1024x128": 7,
    },
    "MlaVersion": {"V32": 0, "V40": 1},
    "MxScaleRoundMode": {"RoundDown": 0, "RoundUp": 1, "Even": 2, "Ceil": 3},
}


def set_up(folder: Path, source: str, arch: str, on_cuda: bool = False) -> None:
    """Let `import aiter` find the checkout at `source`, and believe in a GPU of this architecture,
    in this process.

    on_cuda  there is a GPU of NVIDIA's, which is to stay what it is
    """
    for name, text in TOOLS.items():
        tool = folder / "bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(text.format(arch=arch, units=UNITS[arch]))
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    os.environ.update(
        PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
        ROCM_HOME=str(folder),
        AITER_JIT_DIR=str(folder / "jit"),
        GPU_ARCHS=arch,
        CU_NUM=str(UNITS[arch]),
        AITER_LOG_LEVEL="ERROR",
        **{f"AITER_CONFIG_{table}": str(folder / "no table") for table in TABLES},
    )
    (folder / "jit").mkdir(exist_ok=True)
    for name in ("module_aiter_core", "module_aiter_enum"):  # of today's versions, of those before
        sys.modules[name] = _compiled_enums(name)
        sys.modules[f"aiter.jit.{name}"] = _compiled_enums(f"aiter.jit.{name}")
    import torch

    importlib.import_module(
        "torch._dynamo"
    )  # it looks for pandas, too, and would take the stand-in for real

    if (
        importlib.util.find_spec("pandas") is None
    ):  # by which AITER reads its tables of tuned products
        sys.modules["pandas"] = stand_in = types.ModuleType("pandas")
        stand_in.DataFrame = dict
    if not on_cuda:  # of whom versions ask the number of multiprocessors
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
            multi_processor_count=UNITS[arch]
        )
    sys.path.insert(0, source)
    sys.dont_write_bytecode = True
    drive_triton_for(arch)


def _compiled_enums(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = __file__  # logged by AITER
    for title, members in ENUMS.items():
        made = enum.IntEnum(title, members)
        made.__doc__ = "Members:"  # by which AITER knows an enum of a compiled module
        setattr(module, title, made)
    module.aiter_tensor_t = type("aiter_tensor_t", (), {})
    return module


def drive_triton_for(arch: str) -> None:
    """Make Triton's active driver one that knows nothing but its target."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Pretended(DriverBase):
        def __init__(self) -> None:
            self.get_device_capability = lambda device=0: (9, 4)
            self.get_current_stream = lambda device=0: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("hip", arch, 64)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> None:
            raise NotImplementedError("nothing is timed here")

    driver.set_active(Pretended())


def interpret() -> None:
    """Let Triton's interpreter run AITER's kernels on a CPU. Call before AITER is imported."""
    import ast

    import numpy as np
    import torch
    import triton.language as tl
    from interpreted_floats import round_to_nearest
    from interpreted_launches import patch_once_a_launch
    from triton.runtime import interpreter

    # AITER assumes that strides are positive, and passes 0 for tensors that are absent.
    interpreter.InterpreterBuilder.create_assume = lambda self, condition: None

    round_to_nearest()
    patch_once_a_launch()

    # A method of tensors that the interpreter does not know of.
    tl.tensor.floor = lambda self: tl.math.floor(self, _semantic=interpreter.interpreter_semantic)

    # The interpreter has no product of codes with scales.
    def dot_scaled(
        lhs,
        lhs_scale,
        lhs_format,
        rhs,
        rhs_scale,
        rhs_format,
        acc,
        fast_math,
        lhs_k_pack,
        rhs_k_pack,
        out_dtype,
    ):
        from atomc.ops.scaled_linear import mxfp4_values

        formats = [getattr(given, "value", given) for given in (lhs_format, rhs_format)]
        assert formats in (["e2m1", "e2m1"], ["bf16", "e2m1"]), f"{formats} is not played"
        assert lhs_k_pack and rhs_k_pack
        b, b_scale = (torch.from_numpy(x.handle.data.copy()) for x in (rhs, rhs_scale))
        if formats[0] == "e2m1":
            a, a_scale = (torch.from_numpy(x.handle.data.copy()) for x in (lhs, lhs_scale))
            values = mxfp4_values(a, a_scale)
        else:
            wide = interpreter.interpreter_semantic.cast(lhs, tl.float32)
            values = torch.from_numpy(wide.handle.data.copy())
        product = values @ mxfp4_values(b.t().contiguous(), b_scale).t()
        return tl.tensor(
            interpreter.TensorHandle(acc.handle.data + product.numpy(), tl.float32), acc.type
        )

    interpreter.interpreter_semantic.dot_scaled = dot_scaled

    # Which tl.flip is made of; the interpreter would walk over the elements in Python.
    apply = interpreter.ReduceOps.apply_impl

    def reduced(self, given):
        if self.combine_fn != tl.standard._xor_combine:
            return apply(self, given)
        data = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, given[0].dtype)

    interpreter.ReduceOps.apply_impl = reduced

    # `not mask` is a Python bool in the interpreter, and an elementwise one where it is compiled.
    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        elementwise = ast.parse(
            "(lambda x: x == 0 if hasattr(x, 'handle') else not x)(0)", mode="eval"
        ).body
        elementwise.args = [node.operand]
        return ast.fix_missing_locations(ast.copy_location(elementwise, node))

    visit_assignment = interpreter.ASTTransformer.visit_Assign

    def visit_Assign(self, node):  # which by itself does not look inside
        return visit_assignment(self, self.generic_visit(node))

    interpreter.ASTTransformer.visit_UnaryOp = visit_UnaryOp
    interpreter.ASTTransformer.visit_Assign = visit_Assign
    _accept_unused_keys(first_only=False)


def replace_device_functions() -> None:
    """Plain arithmetic for two functions of ROCm's device library. Call after the import of
    AITER.
    """
    import device_functions

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("aiter."):
            for name in ("fast_expf", "fast_dividef"):
                if hasattr(module, name):
                    setattr(module, name, getattr(device_functions, name))


def answer_for_the_device() -> None:
    """Say how many tokens a program takes, which AITER reckons from the multiprocessors of a GPU,
    and what its compiled sorting of experts needs as a workspace. Call after the import.
    """
    aiter = sys.modules.get("aiter")
    if hasattr(aiter, "moe_sorting_opus_get_workspace_size"):
        aiter.moe_sorting_opus_get_workspace_size = lambda *sizes: 0
    module = sys.modules.get("aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache")
    if module is not None:
        module.infer_rope_cache_triton_block_t = lambda tokens, device: 4


def compile_only(compiled: list[str]) -> None:
    """Let a launch of a Triton kernel compile it to an object, note its name in `compiled`, and
    launch nothing.
    """
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["hsaco"][:4] == b"\x7fELF", f"{self.fn.__name__} did not become an object"
        compiled.append(self.fn.__name__)
        return kernel

    JITFunction.run = run
    _accept_unused_keys(first_only=True)


def launch_nothing() -> None:
    """Let a launch of a Triton kernel do nothing: its tensors are fake."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: None


def leave_out_what_is_amds() -> None:
    """Let NVIDIA's compiler take AITER's launches. Call before AITER is imported."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    # AITER writes exponents, negative ones too, as unsigned bytes: AMD's compiler goes by whole
    # numbers with a sign, and they wrap around; NVIDIA's instruction makes them 0.
    cast = TritonSemantic.cast

    def casted(self, value, dtype, *args, **kwargs):
        if value.dtype.is_floating() and dtype.scalar == tl.uint8:
            value = cast(self, value, tl.int32)
        return cast(self, value, dtype, *args, **kwargs)

    TritonSemantic.cast = casted

    run, init = JITFunction.run, Autotuner.__init__

    def launched(self, *args, grid, warmup, **kwargs):
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in AMD_ONLY or name in self.arg_names
        }
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def tuned(self, fn, arg_names, configs, *args, **kwargs):
        for config in configs or ():
            for name in set(AMD_ONLY) - set(arg_names):
                config.kwargs.pop(name, None)
        init(self, fn, arg_names, configs, *args, **kwargs)

    JITFunction.run, Autotuner.__init__ = launched, tuned
    _accept_unused_keys(first_only=True)


def run_on_cuda() -> None:
    """Give Triton its own driver back. Call after the import of AITER, which asks for the
    architecture but once.
    """
    from triton.runtime import driver

    driver.reset_active()


def _accept_unused_keys(first_only: bool) -> None:
    """AITER names keys of autotuners that its kernels do not take, which its own Triton lets
    pass.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self, fn, arg_names, configs, key, *args, **kwargs):
        used = [name for name in key if name in arg_names]
        original(
            self,
            fn,
            arg_names,
            configs[:1] if first_only and configs else configs,
            used,
            *args,
            **kwargs,
        )

    Autotuner.__init__ = init
