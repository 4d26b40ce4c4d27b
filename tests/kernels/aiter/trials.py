"""One kernel over the case table, on the stage that child.py has set up."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from aiter_cases import ANSWER, KERNELS, cases, is_todays, prepared
from compare import compare
from kernel_cases.draw import Draw
from memory import PoisonedMemory
from stage import answer_for_the_device, replace_device_functions, run_on_cuda
from test_kernels import strides, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from triton.compiler.errors import CompilationError

import atomc
from atomc.kernels.aiter import library
from atomc.loading.create_model import create_model
from atomc.ops.op import REGISTRY, Kernel, refusal
from atomc.platform import Platform
from atomc.quantization import quantize

__all__ = ["ANSWER", "answer"]

Make = Callable[[], dict[str, Any]]
# In the interpreter thousands of programs, one after another in Python; other modes without a GPU
# learn nothing from them.
SLOW = ("many", "wide", "several tiles", "long, one row")


def answer(mode: str, arch: str, compiled: list[str], request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    if reason := library.missing():
        raise RuntimeError(reason)
    lacking = {
        repr(f): f.found for f in library.FUNCTIONS if isinstance(f.found, str)
    }  # which imports them all
    answer_for_the_device()
    if mode in ("interpret", "cuda"):
        replace_device_functions()
    if mode == "cuda":
        run_on_cuda()
    if "lacking" in request:
        return lacking
    if "model" in request:
        return whole_model(arch, request["model"], "cuda" if mode == "cuda" else "cpu")
    kernel, dtype = KERNELS[request["kernel"]], getattr(torch, request["dtype"])
    here = replace(Platform.named(arch), here=True)
    outcomes: dict[str, str] = {}
    for name, make in cases(kernel, arch).items():
        passed = sum(outcome.startswith("passed") for outcome in outcomes.values())
        if passed >= request.get("most", 1000) or (mode != "cuda" and name.startswith(SLOW)):
            continue

        def arguments(make: Any = make) -> dict[str, Any]:
            return make(Draw(dtype, "cuda" if mode == "cuda" else "cpu", kernel.layout or "paged"))

        try:
            if refused := refusal(kernel, here, arguments()):
                outcomes[name] = f"refused: {refused.text}"
            elif mode in ("interpret", "cuda"):
                compare(kernel, arguments, dtype, ties_away=not is_todays())
                outcomes[name] = "passed"
            elif mode == "compile":
                outcomes[name] = f"passed {' '.join(objects(kernel, arguments, compiled))}"
            else:
                outcomes[name] = f"passed {' '.join(called_on_fakes(kernel, arguments))}"
        except CompilationError as error:
            narrow = mode == "cuda" and "K >= 16" in str(error.__cause__ or error)
            outcomes[name] = f"{'refused' if narrow else 'failed'}: {traceback.format_exc()}"
        except Exception:
            outcomes[name] = f"failed: {traceback.format_exc()}"
    return outcomes


def objects(kernel: Kernel, arguments: Make, compiled: list[str]) -> list[str]:
    """The names of the Triton kernels that a call compiles."""
    compiled.clear()
    kernel.function(**prepared(kernel, arguments()))
    return sorted(set(compiled))


def called_on_fakes(kernel: Kernel, arguments: Make) -> list[str]:
    """The functions of AITER that a call on fake tensors calls; the result is shaped as the op
    says.
    """
    called: list[str] = []
    found = {function: function.found for function in library.FUNCTIONS}

    def noting(function: library.Function) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(repr(function))
            return found[function](*args, **kwargs)

        return call

    for function in library.FUNCTIONS:
        function.found = noting(function)
    real = arguments()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            given = tree_map_only(Tensor, mode.from_tensor, real)
            wanted = tensors(REGISTRY[kernel.op].overload(**given))
            actual = tensors(kernel.function(**prepared(kernel, given)))
    finally:
        for function in library.FUNCTIONS:
            function.found = found[function]
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in wanted]
    assert [strides(x) for x in actual] == [strides(x) for x in wanted]
    return called


LACKS = "this AITER has no "
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float16",
}
PROMPT = [3, 1, 4, 1, 5, 9, 2]


def whole_model(arch: str, scheme: str, device: str) -> dict[str, Any]:
    """A small Llama in `scheme`, as a backend compiles it and as the runtime does, with all that
    AITER has in Triton.

    kernels  op -> who serves it, of both programs
    lacking  ops of which this AITER has not every function
    sqnr     of the compiled model's logits, by those of the model as written, in decibels
    tokens   what the runtime generates with AITER, and with torch alone
    """
    for function in library.FUNCTIONS:
        if "triton" not in function.modules[0]:
            function.found = "there is nothing compiled on this stage"
    platform = replace(Platform.named(arch), device=device, here=True)
    Platform.detect = staticmethod(lambda device_type=None: platform)
    ids, positions = torch.tensor(PROMPT, device=device), torch.arange(len(PROMPT), device=device)
    options = {"glue": "eager", "strict": True, "cache": False}

    def made() -> Any:
        torch.manual_seed(0)
        model = create_model(CONFIG, torch.float16).requires_grad_(False).eval().to(device)
        return quantize(model, scheme) if scheme else model

    with torch.inference_mode():
        exact = made()(ids, positions)
        got = torch.compile(made(), backend="atom", options=options)(ids, positions)
    choices = list(atomc.reports()[-1].kernels)
    generated = []
    for providers in ((), ("torch",)):
        llm = atomc.LLM(
            made(),
            max_model_len=64,
            enforce_eager=True,
            options={**options, "providers": providers},
        )
        choices += [] if providers else atomc.reports()[-1].kernels
        params = atomc.SamplingParams(max_tokens=4, temperature=0.0)
        with PoisonedMemory():
            answers = llm.generate([PROMPT, PROMPT[:3]], params)
        generated.append([list(answer.token_ids) for answer in answers])
    noise = (exact.double() - got.double()).square().mean()
    return {
        "kernels": {
            op: sorted({c.chosen for c in choices if c.op == op}) for op in {c.op for c in choices}
        },
        "lacking": sorted(
            {
                c.op
                for c in choices
                for who, why in c.refused
                if who == "aiter" and why.startswith(LACKS)
            }
        ),
        "sqnr": float(10 * torch.log10(exact.double().square().mean() / noise)),
        "tokens": generated,
    }
