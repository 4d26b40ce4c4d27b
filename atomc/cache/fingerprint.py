"""Cache key inputs other than the program, as named parts: compiles with equal parts give equal
results.

The parts are options, versions, the machine, settings of torch and its compilers, and the source of
every kernel, op and pass. The program is a graph from Dynamo (atomc.cache.graph_fingerprint) or a
model (atomc.cache.model_fingerprint).
"""

import dataclasses
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx.node import Argument

from atomc import kernels
from atomc.cache.artifact import Uncacheable
from atomc.ops.op import REGISTRY
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.registered import REGISTERED
from atomc.tested_versions import installed_version
from atomc.torch_compat.core import (
    autocast_is_on,
    changed_settings,
    compiler_variables,
    outside_of_tracing,
)
from atomc.weights import packed, prepared
from atomc.weights.freed import forms_held

if TYPE_CHECKING:
    from atomc.rewriting.graph_pass import Pass

Parts = dict[str, str]

# These change reports and files, but not the compiled code.
_REPORTING_OPTIONS = (
    "strict",
    "disable",
    "dump",
    "report",
    "expect",
    "expect_mode",
    "cache",
    "cache_dir",
    "cache_size",
)
# Folders of the package with the code of models.
MODEL_CODE = ("models", "stock", "loading")
# Folders and files of the package that do not influence what is compiled.
_NOT_COMPILING = (
    *MODEL_CODE,
    "runtime",
    "planning",
    "demo",
    "report/render",
    "report/__main__.py",
    "report/page_file.py",
    "cli",
    "kernels",
    "__main__.py",
    "__init__.py",
    "compiler/explain.py",
    "report/contract.py",
)
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def environment_parts(options: Options, platform: Platform) -> Parts:
    """The parts that are equal for every program. Raises Uncacheable if a kernel or pass cannot be
    identified.
    """
    if autocast_is_on():
        raise Uncacheable("autocast is on")
    parts = {f"option {name}": value for name, value in _options(options)}
    parts |= {f"version of {name}": version for name, version in _versions().items()}
    parts |= {f"platform {name}": value for name, value in _machine(platform)}
    parts |= {f"setting {name}": value for name, value in _settings().items()}
    return parts | _sources()


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _options(options: Options) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(options):
        if field.name not in _REPORTING_OPTIONS:
            value = getattr(options, field.name)
            in_order = dict(sorted(value.items())) if isinstance(value, dict) else value
            yield field.name, repr(in_order)


def _machine(platform: Platform) -> Iterator[tuple[str, str]]:
    for name, value in vars(platform).items():
        if name == "memory":
            # The part reserved by the system differs from start to start.
            yield name, f"{value >> 30} GiB"
        else:
            yield name, " ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


@functools.cache
def _versions() -> dict[str, str]:
    versions = {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "Python": sys.version.split(" ")[0],
        "CUDA": str(torch.version.cuda),
        "ROCm": str(torch.version.hip),
    }
    others = ("atomc", "triton", "amd-aiter", "amd-mori", "zentorch", "fla-core")
    return versions | {name: installed_version(name) or "none" for name in others}


def _settings() -> dict[str, str]:
    """Settings of torch that change what is compiled."""
    return {
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "fp16 and bf16 reductions": repr(
            [
                getattr(torch.backends.cuda.matmul, name)
                for name in (
                    "allow_tf32",
                    "allow_fp16_reduced_precision_reduction",
                    "allow_bf16_reduced_precision_reduction",
                )
            ]
        ),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "Inductor's configuration": ", ".join(changed_settings("torch._inductor.config")),
        "variables of torch's compilers": ", ".join(compiler_variables()),
    }


def _sources() -> Parts:
    """A digest per kernel from outside of the package, registered pass, and file of the package
    that influences compilation. Imports no kernels.
    """
    parts: Parts = {}
    for op in REGISTRY.values():
        for kernel in op.kernels:
            if kernel.function.__module__.startswith(f"{kernels.__name__}."):
                continue  # one of the files below
            name = f"source of kernel {kernel.provider} {op.name}"
            parts[name] = digest(
                parts.get(name, "") + kernel.function.__qualname__ + source_of(kernel.function)
            )
    for i, (added, before) in enumerate(REGISTERED):
        sources = "".join(map(source_of, _functions(added)))
        parts[f"source of pass {added.name}"] = f"{sources}, the {i}th, before {before}"
    return parts | sources_in("kernels") | sources_in("")


def sources_in(*places: str) -> Parts:
    """A digest per file of folders of the package, or of single files; "": all that influence
    compilation except kernels.
    """
    files = [
        path
        for place in places
        for path in ([place] if place.endswith(".py") else _package_files(place))
    ]
    return {f"source of atomc/{path}": file_digest(PACKAGE / path) for path in files}


PACKAGE = Path(__file__).parents[1]


def _functions(added: "Pass") -> list[types.FunctionType]:
    values = [item for rewrite in added.rewrites for item in vars(rewrite).values()]
    return [item for item in [added.run, *values] if inspect.isfunction(item)]


@functools.cache
def _package_files(folder: str) -> tuple[str, ...]:
    """The files below a folder of the package; "": all that influence compilation except
    kernels.
    """
    files = []
    waiting = [PACKAGE / folder]
    while waiting:
        for path in waiting.pop().iterdir():
            name = path.relative_to(PACKAGE).as_posix()
            if (not folder and name in _NOT_COMPILING) or path.name == "__pycache__":
                continue
            if path.is_dir():
                waiting.append(path)
            elif path.suffix == ".py":
                files.append(name)
    return tuple(sorted(files))


def source_of(function: Callable[..., Any]) -> str:
    """A digest of the file that defines a function. Raises Uncacheable for a closure."""
    function = inspect.unwrap(function)
    if "<locals>" in function.__qualname__ and getattr(function, "__closure__", None):
        raise Uncacheable(
            f"{function.__qualname__} is a closure: it depends on variables of the enclosing "
            "function"
        )
    code = getattr(function, "__code__", None)
    if code is None:
        return function.__module__ or ""
    return (
        file_digest(Path(code.co_filename))
        if Path(code.co_filename).is_file()
        else digest(code.co_code)
    )


def file_digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of_file(str(path), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _digest_of_file(path: str, changed: int, size: int) -> str:
    return digest(Path(path).read_bytes())


def digest_of_values(tensor: Tensor) -> str:
    with outside_of_tracing():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return digest(flat.numpy().tobytes())


def tensor_layout(tensor: Tensor) -> str:
    """dtype, shape, strides and device."""
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device}"


def input_kind(item: Argument) -> str:
    """Properties of a real input that compilation reads: its type, and why it cannot be prepared or
    packed.
    """
    kind = type(item).__name__
    if not isinstance(item, Tensor):
        return kind
    if item.is_meta:
        raise Uncacheable("the model is on the meta device")
    if type(item) not in PLAIN_TENSORS and kind != "FakeTensor":
        raise Uncacheable(f"an input is a {kind}")
    refused: dict[str, str | bool | None]
    if isinstance(item, nn.Parameter):
        refused = {
            "no copy": prepared.unpreparable(item),
            "no pack": packed.unpackable(item),
            "held": forms_held(item),
        }
    else:
        refused = {"made in inference mode": item.is_inference() or None}
    return ", ".join(
        [kind, *(f"{what}: {why}" for what, why in refused.items() if why is not None)]
    )
