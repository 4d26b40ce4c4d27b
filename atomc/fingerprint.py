"""What a compiled graph depends on, as named parts: two compiles whose parts are equal make the same.

The graph as Dynamo gives it, its inputs, the options, the versions, the machine, the settings of torch and Inductor, and
the source of every kernel, op and pass. Values of weights are no part: compiled code reads them at each call.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from atomc import copies, kernels, packs
from atomc.artifact import Unstorable
from atomc.graph_pass import Pass
from atomc.op import REGISTRY
from atomc.options import Options
from atomc.passes import PIPELINE
from atomc.pipeline import with_registered
from atomc.platform import Platform
from atomc.provenance import module_path, source_line
from atomc.torch_compat import autocast_is_on, outside_of_tracing
from atomc.torch_inductor import inductor_settings
from atomc.torch_tracing import size_facts, source_name

Parts = dict[str, str]

# What they say is in the report, and changes nothing of the compiled code.
_SILENT_OPTIONS = ("strict", "disable", "dump", "report", "expect", "expect_mode", "cache", "cache_dir", "cache_size")
# Folders and files of the package that have no say in what is compiled.
_ASIDE = ("runtime", "models", "demo", "render", "cli", "kernels", "__main__.py", "__init__.py", "inspection.py",
          "contract.py")  # fmt: skip
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def parts_of(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, platform: Platform, floats: dict[int, float], *,
    paged: bool,
) -> Parts:  # fmt: skip
    """The parts for one graph of Dynamo's. Raises Unstorable if something in it cannot be told from something else."""
    if autocast_is_on():
        raise Unstorable("autocast is on")
    lines: list[str] = []
    places: list[str] = []
    _describe(gm, lines, places)
    parts = {"kind of program": "runtime" if paged else "torch.compile"}
    parts |= {f"option {name}": repr(value) for name, value in _options(options)}
    parts |= {f"version of {name}": version for name, version in _versions().items()}
    parts |= {f"platform {name}": value for name, value in _machine(platform)}
    parts |= {f"setting {name}": value for name, value in _settings().items()}
    parts |= _sources()
    placeholders = gm.graph.find_nodes(op="placeholder")
    first: dict[int, int] = {}
    for i, given in enumerate(example_inputs):
        first.setdefault(id(given), i)
    spelled = [f"{source_name(node)}: {_value(node.meta.get('example_value'))}, {_given(given, first[id(given)])}"
               for node, given in zip(placeholders, example_inputs, strict=True)]  # fmt: skip
    parts |= {f"input {i}": text for i, text in enumerate(spelled)}
    parts["sizes"] = "; ".join(size_facts(gm.graph))
    parts["floats"] = repr(sorted(floats.items()))
    parts["graph"] = _digest("\n".join(lines))
    parts["source lines"] = _digest("\n".join(places))
    return parts


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _options(options: Options) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(options):
        if field.name not in _SILENT_OPTIONS:
            value = getattr(options, field.name)
            yield field.name, dict(sorted(value.items())) if isinstance(value, dict) else value


def _machine(platform: Platform) -> Iterator[tuple[str, str]]:
    for name, value in vars(platform).items():
        if name == "memory":
            yield name, f"{value >> 30} GiB"  # what the system keeps for itself differs from start to start
        else:
            yield name, " ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


@functools.cache
def _versions() -> dict[str, str]:
    found = {"torch": f"{torch.__version__} ({torch.version.git_version})", "Python": sys.version.split(" ")[0],
             "CUDA": str(torch.version.cuda), "ROCm": str(torch.version.hip)}  # fmt: skip
    for name in ("atomc", "triton", "amd-aiter", "zentorch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _settings() -> dict[str, str]:
    """What can be set in torch and changes what is compiled."""
    return {
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "fp16 and bf16 reductions": repr([getattr(torch.backends.cuda.matmul, name) for name in (
            "allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")]),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "Inductor's configuration": _digest(inductor_settings()),
    }  # fmt: skip


def _sources() -> Parts:
    """A digest per kernel, and per file of the package that has a say."""
    parts = {f"provider {name}": kernels.load(name) or "loaded" for name in kernels.PROVIDERS}
    for op in REGISTRY.values():
        for kernel in op.kernels:
            name = f"source of kernel {kernel.provider} {op.name}"
            parts[name] = _digest(parts.get(name, "") + kernel.function.__qualname__ + _source_of(kernel.function))
    pipeline = with_registered(PIPELINE)
    parts["passes"] = ", ".join(p.name for p in pipeline)
    for added in [p for p in pipeline if p not in PIPELINE]:
        parts[f"source of pass {added.name}"] = "".join(map(_source_of, _functions(added)))
    for folder in ("kernels", ""):
        for path in _package_files(folder):
            parts[f"source of atomc/{path}"] = _file_digest(_PACKAGE / path)
    return parts


_PACKAGE = Path(__file__).parent


def _functions(added: Pass) -> list[Callable[..., Any]]:
    found = [item for rewrite in added.rewrites for item in vars(rewrite).values()]
    return [item for item in [added.run, *found] if inspect.isfunction(item)]


@functools.cache
def _package_files(folder: str) -> tuple[str, ...]:
    """The files of the package below a folder of it; "": all that have a say but those of kernels."""
    found = []
    waiting = [_PACKAGE / folder]
    while waiting:
        for path in waiting.pop().iterdir():
            name = path.relative_to(_PACKAGE).as_posix()
            if (not folder and name in _ASIDE) or path.name == "__pycache__":
                continue
            if path.is_dir():
                waiting.append(path)
            elif path.suffix == ".py":
                found.append(name)
    return tuple(sorted(found))


def _source_of(function: Callable[..., Any]) -> str:
    """A digest of the file that defines a function. Raises Unstorable for one that depends on more than its file."""
    function = inspect.unwrap(function)
    if "<locals>" in function.__qualname__ and getattr(function, "__closure__", None):
        raise Unstorable(f"{function.__qualname__} is defined inside another function, on whose variables it depends")
    code = getattr(function, "__code__", None)
    if code is None:
        return function.__module__ or ""
    return _file_digest(Path(code.co_filename)) if Path(code.co_filename).is_file() else _digest(code.co_code)


def _file_digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of_file(str(path), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _digest_of_file(path: str, changed: int, size: int) -> str:
    return _digest(Path(path).read_bytes())


def _describe(gm: GraphModule, lines: list[str], places: list[str]) -> None:
    """The graph and the graphs in it, a line a node; and where its nodes stand in the user's program."""
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            lines.append(f"{node.name} = {_attribute(gm, node, lines, places)}")
        elif node.op != "placeholder":
            target = _target(node.target)
            lines.append(f"{node.name} = {node.op} {target} {_spell(node.args)} {_spell(node.kwargs)} {module_path(node)}")
            places.append(source_line(node))
        else:
            lines.append(f"{node.name} = input")


def _attribute(gm: GraphModule, node: Node, lines: list[str], places: list[str]) -> str:
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    if isinstance(found, GraphModule):
        lines.append("{")
        _describe(found, lines, places)
        return "}"
    if type(found) in _PLAIN_TENSORS and not found.is_meta:
        with outside_of_tracing():
            flat = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return f"{_value(found)} {_digest(flat.numpy().tobytes())}"
    raise Unstorable(f"{node.target} in the graph is a {type(found).__name__}")


def _target(target: Any) -> str:
    if isinstance(target, str) or type(target).__module__ == "torch._ops":
        return str(target)
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', None) or target.__name__}"
    known = (target.__module__ or "torch").partition(".")[0] in ("torch", "_operator", "builtins", "math", "einops")
    return name if known else f"{name} {_source_of(target)}"


def _spell(item: Any) -> str:
    """An argument, equal for equal arguments of two processes."""
    match item:
        case Node():
            return item.name
        case tuple() | list():
            return f"{type(item).__name__}({', '.join(map(_spell, item))})"
        case dict():
            return "{" + ", ".join(f"{key!r}: {_spell(part)}" for key, part in item.items()) + "}"
        case slice():
            return f"slice{_spell((item.start, item.stop, item.step))}"
        case Tensor():
            return _value(item)
        case enum.Enum():
            return str(item)
    text = repr(item)
    if _ADDRESS.search(text):
        raise Unstorable(f"a {type(item).__name__} in the graph cannot be compared between processes")
    return f"{type(item).__name__} {text}"


def _value(fake: Any) -> str:
    if isinstance(fake, Tensor):
        return f"{fake.dtype} {list(fake.shape)} strides {list(fake.stride())} on {fake.device}"
    return _spell(fake)


def _given(given: Any, number: int) -> str:
    """What else compiling may look at of a real input: what it is, and why no copy of it may be kept or it not be packed.

    number  of the first input that is the same object
    """
    if not isinstance(given, Tensor):
        return type(given).__name__
    kind = type(given).__name__
    if given.is_meta:
        raise Unstorable("the model is on the meta device")
    if type(given) not in _PLAIN_TENSORS and kind != "FakeTensor":
        raise Unstorable(f"an input is a {kind}")
    refused: dict[str, str | bool | None]
    if isinstance(given, nn.Parameter):
        refused = {"no copy": copies.unfit(given), "no pack": packs.unfit(given)}
    else:
        refused = {"made in inference mode": given.is_inference() or None}
    return ", ".join([f"{kind} {number}", *(f"{what}: {why}" for what, why in refused.items() if why is not None)])


