"""Private API of Inductor: compiling to source, loading source, options."""

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule

from atomc.files.json_types import JSONLike, JSONMapping
from atomc.torch_compat.core import (
    FakeTensorMode,
    GraphFunction,
    Input,
    outside_of_tracing,
)
from atomc.torch_compat.cpp_kernels import remember_cpp_kernels
from atomc.torch_compat.tracing import added_by_aot
from atomc.trusted_folder import trusted_folder

if TYPE_CHECKING:
    from torch._inductor.cpu_vec_isa import VecISA
    from torch._inductor.output_code import OutputCode


# Names and values of torch._inductor.config.
Patches = JSONMapping


# Inductor sets them where it compiles or loads its kernels: the folder of Triton's cache, the ptxas
# that torch brings, and CUDA's libdevice. Triton's cache has kernels by the versions of the latter.
_TRITON_SETTINGS = ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH")


_settings = threading.local()


@contextlib.contextmanager
def _triton_settings() -> Iterator[None]:
    """Inductor's settings of Triton hold in this context only, until the outermost one ends. Other
    kernels that are compiled under them would not be found by the next process, or by the helper
    that compiles some of them.
    """
    if getattr(_settings, "hold", False):
        yield
        return
    unset = [name for name in _TRITON_SETTINGS if name not in os.environ]
    _settings.hold = True
    try:
        yield
    finally:
        _settings.hold = False
        for name in unset:
            os.environ.pop(name, None)
        tasks = sys.modules.get("torch._inductor.runtime.compile_tasks")
        if set_ptxas := getattr(tasks, "_set_triton_ptxas_path", None):
            set_ptxas.cache_clear()  # it does so once
        knobs = getattr(sys.modules.get("triton"), "knobs", None)
        if knobs is not None and "TRITON_LIBDEVICE_PATH" in unset:
            vars(knobs.nvidia).pop("libdevice_path", None)


def _use_trusted_folders() -> None:
    """Inductor unpickles and imports what its folders hold. One that other users may write is
    replaced for the rest of the process: graphs of gradients are compiled later.
    """
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    default = cache_dir_utils.default_cache_dir()
    # Some files, such as headers, are there whatever the variable says.
    trusted = str(trusted_folder(Path(default), "inductor"))
    variable = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if variable not in (None, default):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(trusted_folder(Path(variable), "inductor"))
    elif trusted != default:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = trusted
    if trusted != default:
        for module in (cache_dir_utils, runtime_utils, codecache):
            setattr(module, "default_cache_dir", lambda: trusted)  # noqa: B010
        codecache._HEADER_DIR = f"{trusted}/precompiled_headers"
        codecache._HEADER_LOCK_DIR = f"{codecache._HEADER_DIR}/locks"


class _WithoutAttention:
    """Inductor's patterns that `apply` without those of attention."""

    def __init__(self, patterns: Any):
        self.all = patterns

    def apply(self, graph: Any) -> int:
        from torch._inductor import pattern_matcher

        table = map(_search_and_pattern, pattern_matcher._known_precompiled_patterns)
        attention = {
            id(pattern) for search, pattern in table if search.__name__.startswith("_sfdp")
        }
        others = pattern_matcher.PatternMatcherPass()
        for key, entries in self.all.patterns.items():
            others.patterns[key] += [
                entry for entry in entries if id(getattr(entry, "pattern", None)) not in attention
            ]
        return int(others.apply(graph))


def _search_and_pattern(entry: Any) -> tuple[Any, Any]:
    """The search function of an entry of Inductor's table, and the pattern made of it. Entries are
    tuples, from torch 2.14 on objects.
    """
    if isinstance(entry, tuple):
        return entry[0], entry[-1]
    return entry.search_fn, entry.search_fn_pattern


@functools.cache
def attention_patterns_are_wrong() -> bool:
    """Whether Inductor replaces a softmax over queries by one over keys (pytorch#195320). Takes
    0.4 s once a process; half of it is setup that Inductor needs anyway.
    """
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.pattern_matcher import fwd_only

    def attends_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * 0.5).softmax(-2) @ v

    with outside_of_tracing():
        joint_graph.lazy_init(torch.device("cpu"))
        with FakeTensorMode():
            examples = [torch.empty(2, 4, 8, 8) for _ in range(3)]
            gm = fwd_only(attends_over_queries, examples)
        joint_graph.pass_patterns[0].apply(gm.graph)
    return any("scaled_dot_product" in str(node.target) for node in gm.graph.nodes)


def finds_wrong_attention(gm: GraphModule) -> bool:
    """Whether a graph has a softmax, perhaps written out, and Inductor's patterns are wrong."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    targets = {str(node.target) for graph in graphs for node in graph.nodes}
    has_softmax = any(re.search(r"softmax|\bexp\b", target) for target in targets)
    return has_softmax and attention_patterns_are_wrong()


@contextlib.contextmanager
def _right_patterns(gm: GraphModule) -> Iterator[None]:
    """Inductor compiles without its attention patterns in this context, if they are wrong."""
    if not finds_wrong_attention(gm):
        yield
        return
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes import joint_graph

    class KeyOfCache(CustomGraphPass):
        """Tells what is compiled here apart from the same graph with these patterns."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return "without attention patterns"

    passes: list[Any] = joint_graph.pass_patterns
    first = passes[0]
    passes[0] = _WithoutAttention(first)
    custom = torch._inductor.config.joint_custom_pre_pass or KeyOfCache()
    try:
        with torch._inductor.config.patch(joint_custom_pre_pass=custom):
            yield
    finally:
        passes[0] = first


@_triton_settings()
def inductor(
    gm: GraphModule, inputs: Sequence[Input], patches: Patches | None = None
) -> GraphFunction:
    """Compile a graph with Inductor, as its own backend does; `patches`: values for
    torch._inductor.config.
    """
    from torch._inductor.compile_fx import compile_fx

    _use_trusted_folders()
    examples: Any = list(inputs)  # Inductor's type of inputs has no floats
    with _right_patterns(gm):
        compiled: Any = compile_fx(gm, examples, config_patches=dict(patches or {}))
    function: GraphFunction = compiled
    return function


@contextlib.contextmanager
def kernels_at_once() -> Iterator[None]:
    """Inductor compiles the kernels of all graphs of this thread and context at the same time: it
    waits for them at the end, and no function that it returns may be called before. Those of
    Triton are compiled in threads until Inductor's processes are ready, which takes seconds.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    wait, triton, thread = AsyncCompile.wait, AsyncCompile.triton, threading.get_ident()
    processes_are_ready: Callable[[], bool] = AsyncCompile.use_process_pool
    waits: list[Callable[[], None]] = []

    def wait_later(kernels: AsyncCompile, scope: dict[str, Any]) -> None:
        # The code of cpp_wrapper times kernels while it is loaded.
        if threading.get_ident() != thread or torch._inductor.config.cpp_wrapper:
            wait(kernels, scope)
        else:
            waits.append(lambda: wait(kernels, scope))

    def triton_in_thread(kernels: AsyncCompile, *kernel: str, **device: str) -> Any:
        if threading.get_ident() != thread or get_compile_threads() == 1 or processes_are_ready():
            return triton(kernels, *kernel, **device)
        return threads.submit(triton_now, kernels, *kernel, **device)

    def triton_now(kernels: AsyncCompile, *kernel: str, **device: str) -> Any:
        compiled: Any = triton(kernels, *kernel, **device)
        return compiled.result() if hasattr(compiled, "result") else compiled

    with (
        _triton_settings(),
        ThreadPoolExecutor(16) as threads,
        patch.object(AsyncCompile, "wait", wait_later),
        patch.object(AsyncCompile, "triton", triton_in_thread),
    ):
        yield
        for wait_now in waits:
            wait_now()


def load_inductor() -> None:
    """Import what compiling with Inductor needs: 1 to 2 s once a process."""
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.fx_passes import joint_graph  # noqa: F401


@dataclass(frozen=True)
class InductorCode:
    """The code of Inductor for a graph: a Python module with `call(inputs: list) -> outputs`.

    constants  attributes of the module
    checked    numbers of the inputs that are copied if they are not aligned
    written    numbers of the inputs that are written in place
    """

    source: str
    constants: dict[str, Tensor]
    checked: list[int]
    written: list[int]


@_triton_settings()
def inductor_code(
    gm: GraphModule, inputs: Sequence[Input], patches: Patches
) -> tuple[GraphFunction, InductorCode | str]:
    """As `inductor`, for a graph without gradients; also the code, or why the code alone is not
    sufficient.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    _use_trusted_folders()
    compiled: Any
    outputs: list[tuple[OutputCode, InductorCode | str]] = []
    returns_tuple = isinstance(
        gm.graph.output_node().args[0], tuple | list
    )  # Inductor always returns a tuple

    def remembering(inner: GraphModule, examples: Any, **kwargs: Any) -> "OutputCode":
        reason = added_by_aot(inner, len(inputs))
        out = compile_fx_inner(inner, examples, **kwargs)
        outputs.append((out, reason or _code_of(out)))
        return out

    # A graph from AOTAutograd's cache has no source code.
    examples: Any = list(inputs)  # Inductor's type of inputs has no floats
    with _right_patterns(gm), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = compile_fx(
            gm, examples, inner_compile=remembering, config_patches=_without_isa_check(patches)
        )
    remember_cpp_kernels()
    if len(outputs) != 1:
        return compiled, f"Inductor compiled {len(outputs)} functions for one graph"
    out, code = outputs[0]
    if isinstance(code, str):
        return compiled, code
    return _unboxed(out, returns_tuple), code


def _code_of(compiled: "OutputCode") -> InductorCode | str:
    from torch._inductor.output_code import CompiledFxGraph

    if type(compiled) is not CompiledFxGraph:
        return f"Inductor returned a {type(compiled).__name__}"
    if (
        compiled.cudagraph_info is not None
        or compiled.frozen_param_names
        or compiled.torchbind_constants
    ):
        return "it contains CUDA graphs of Inductor, frozen parameters or script objects"
    if torch._inductor.config.cpp_wrapper:
        return "Inductor's cpp_wrapper is on"
    written = list(compiled.mutated_input_idxs)
    checked = list(compiled.inputs_to_check)
    if getattr(
        compiled, "_defers_input_alignment", False
    ):  # since 2.13 the code aligns the others itself
        checked = [i for i in checked if i in written]
    return InductorCode(
        _without_unused_imports(compiled.source_code),
        dict(compiled.constants or {}),
        checked,
        written,
    )


def _without_unused_imports(source: str) -> str:
    """Inductor's code without unused imports from Inductor, which take half of the time to load
    it.
    """
    imported = re.compile(
        r"^from torch\._inductor\.[\w.]+ import (?:\w+ as )?(\w+)\n", re.MULTILINE
    )
    return imported.sub(
        lambda line: line[0] if len(re.findall(rf"\b{line[1]}\b", source)) > 1 else "", source
    )


@_triton_settings()
def from_code(code: InductorCode, returns_tuple: bool, patches: Patches) -> GraphFunction:
    """The function that `inductor_code` returned with this code, in another process."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    _use_trusted_folders()
    with torch._inductor.config.patch(_without_isa_check(patches)):
        key, path = PyCodeCache.write(code.source)
        call = PyCodeCache.load_by_key_path(key, path, attrs=code.constants).call
    remember_cpp_kernels()
    aligned: Any = align_inputs_from_check_idxs(call, code.checked, OrderedSet(code.written))
    return _unboxed(aligned, returns_tuple)


def _without_isa_check(patches: Patches) -> dict[str, JSONLike]:
    """The patches, plus one that skips Inductor's check of each vector ISA, which builds libraries
    for 8 s.
    """
    is_known = _vector_isa_works() and torch._inductor.config.cpp.vec_isa_ok is None
    return {"cpp.vec_isa_ok": True, **patches} if is_known else dict(patches)


@functools.cache
def _vector_isa_works() -> bool:
    """Whether torch supports the vector ISA of this CPU, and the compiler accepts the flags of all
    its extensions.
    """
    if not sys.platform.startswith("linux") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    from torch._inductor import cpu_vec_isa

    has = set(cpu_vec_isa.x86_isa_checker())
    flags = [
        isa.build_arch_flags()
        for isa in cpu_vec_isa.supported_vec_isa_list
        if {*str(isa).split()} <= has
    ]
    if not _compiler_accepts(" ".join(flags)):
        return False

    def quickly(isa: "VecISA", code: str) -> bool:
        return _compiler_accepts(isa.build_arch_flags())

    # Inductor caches the result.
    with (
        patch.object(cpu_vec_isa.VecISA, "check_build", quickly),
        torch._inductor.config.patch({"cpp.vec_isa_ok": True}),
    ):
        cpu_vec_isa.valid_vec_isa_list()
    return True


def _compiler_accepts(flags: str) -> bool:
    """Whether the C++ compiler accepts these flags, and so has their intrinsics."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *flags.split(), "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _unboxed(call: Callable[[list[Input]], Sequence[Input]], returns_tuple: bool) -> GraphFunction:
    if returns_tuple:
        return lambda *args: call(list(args))
    return lambda *args: call(list(args))[0]


def num_cache_hits() -> int:
    """The number of graphs that Inductor has loaded from its cache in this process."""
    return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


def mode_options(mode: str) -> dict[str, JSONLike]:
    """Inductor's options for torch.compile(mode=...)."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode != "default" else {}


def inductor_option_names() -> list[str]:
    """The names of Inductor's options."""
    import torch._inductor

    return list(torch._inductor.list_options())
