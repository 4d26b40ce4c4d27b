"""Records what the compiler and the runtime do, and compares two recordings: shows that a
refactoring changes nothing.

    PYTHONPATH=. python bench/recording.py --record before    # in a worktree of the commit before
    PYTHONPATH=. python bench/recording.py --record after     # in a worktree of the commit after
    PYTHONPATH=. python bench/recording.py --compare before after

Both are recorded on one machine. A recording holds, for small models with random weights of a fixed
seed, the dumps after every pass, the counts of rewrites and kernels and the report as JSON, each
for this CPU, for a GPU that need not be here and for the runtime; and the tokens of mixes of
requests as in bench/equality.py. Dumps, counts and tokens must be equal; of near misses and
refusals all but the sentences, which are counted apart. A key that only the second recording has is
no difference.
The exit code is 1 if anything but sentences differs. --only records or compares some models.
"""

import argparse
import difflib
import json
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import equality

import atomc
from atomc import demo
from atomc.loading import loader
from atomc.loading.create_model import create_model
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.report.report import Report, reports
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock.adapter import wrap_stock

WIDTHS: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=256,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=8,
    v_head_dim=24,
    n_routed_experts=4,
    n_group=1,
    num_experts_per_tok=2,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    pad_token_id=0,
)
STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**WIDTHS, "head_dim": 16}),
    "mixtral": ("Mixtral", {**WIDTHS, "num_local_experts": 4, "sliding_window": None}),
    "deepseek_v3": ("DeepseekV3", {**WIDTHS, **LATENT}),
    "gpt2": ("GPT2", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256)),
}
LLAMA = {
    **WIDTHS,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "head_dim": 16,
}
# The platforms for which each model is compiled; None is this machine.
EXPLAINED: dict[str, str | None] = {"cpu": None, "sm90": "sm90", "gfx950": "gfx950"}
RUNTIME: dict[str, str | None] = {"runtime_cpu": None, "runtime_gfx950": "gfx950"}
NAMES = ("demo", "llama_fp8", "deepseek_v3_fp8_block", "qwen3_hooked", *STOCK)
LONGEST = 150  # tokens of a prompt
# For each model: which of equality.ENGINES serve it, and how many mixes each runs.
SERVED = {
    "demo": (range(len(equality.ENGINES)), 3),
    "qwen3": ((0, 1, 6, 7, 8), 2),
    "llama_fp8": ((1, 7), 2),
    "mixtral": ((1, 7), 2),
    "gpt2": ((1, 8), 2),
}

# Keys whose values, or the texts in them, are sentences for people.
SENTENCES = {
    "expected",
    "found",
    "reason",
    "why_not",
    "notes",
    "bugs",
    "absent",
    "taken",
    "about",
    "text",
}
_REFUSED = re.compile(r"/kernels/\d+/refused$")
LEFT_OUT = {
    "phases",
    "stages",
    "cache",
    "machine",
}  # times; texts that the dumps hold; what the machine is


# ---- models


def model_of(name: str) -> nn.Module:
    """A model by its name, with the same weights each time."""
    torch.manual_seed(0)
    if name == "demo":
        return loader.load(demo.PATH, dtype=torch.float32, device="cpu", progress=False)
    if name == "llama_fp8":
        return atomc.quantize(_filled(create_model(LLAMA, dtype=torch.bfloat16)), "fp8")
    if name == "deepseek_v3_fp8_block":
        return atomc.quantize(_stock("deepseek_v3", torch.bfloat16), "fp8_block")
    if name == "qwen3_hooked":
        return _hooked(_stock("qwen3"))
    return _stock(name)


def _stock(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    kind, sizes = STOCK[name]
    config = getattr(transformers, f"{kind}Config")(**sizes, eos_token_id=0, bos_token_id=0)
    return _filled(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype))


def _hooked(model: Any) -> nn.Module:
    """Something stands in the way of most rewrites, so that they nearly fire."""
    first, second = model.model.layers
    first.self_attn.q_norm.register_forward_hook(lambda module, args, out: out.clamp(-9, 9))
    second.self_attn.k_proj.register_forward_hook(lambda module, args, out: out.double().float())
    first.mlp.act_fn.register_forward_hook(lambda module, args, out: out + 1)
    second.mlp.gate_proj.register_forward_hook(lambda module, args, out: out.clone().mul_(2))
    second.post_attention_layernorm.register_forward_hook(
        lambda module, args, out: out + 0 * args[0]
    )
    first.input_layernorm.register_forward_hook(
        lambda module, args, out: out.to(torch.bfloat16).float()
    )
    return cast(nn.Module, model)


def _filled(model: nn.Module) -> nn.Module:
    """Weights so large that the tokens differ from each other."""
    model = model.eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    return model


# ---- recording


def record(folder: Path, only: Sequence[str] = NAMES) -> None:
    os.environ["ATOMC_STRICT"] = "0"  # what is refused is recorded, too
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Dynamo's, of transformers' code
    for name in only:
        started = time.perf_counter()
        for way, platform in EXPLAINED.items():
            _record_compile(folder / name / way, partial(_explain, name, platform))
        for way, platform in RUNTIME.items():
            _record_compile(folder / name / way, partial(_compile, name, platform))
        if name in SERVED:
            _write(folder / name / "tokens.json", tokens(name))
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def _explain(name: str, platform: str | None, out: Path) -> None:
    atomc.explain(
        model_of(name), options={"dump": str(out), "cache": False}, platform=platform, dynamic=True
    )


def _compile(name: str, platform: str | None, out: Path) -> None:
    options = {"dump": str(out), "cache": False, "glue": "eager"}
    compile_model(
        _served(model_of(name)),
        options=options,
        platform=Platform.named(platform) if platform else None,
    )


def _served(model: nn.Module) -> nn.Module:
    return wrap_stock(model) if hasattr(model, "set_attn_implementation") else model


def _record_compile(out: Path, run: Callable[[Path], Any]) -> None:
    """Dumps, counts and reports of one compile; an exception is recorded by type and text."""
    out.mkdir(parents=True, exist_ok=True)
    earlier = {id(report) for report in reports()}
    torch._dynamo.reset()
    error = {}
    try:
        run(out)
    except Exception as raised:
        error = {"type": type(raised).__name__, "text": str(raised)}
    new = [report for report in reports() if id(report) not in earlier]
    _write(out / "baseline.json", [counts_of(report) for report in new])
    _write(out / "report.json", {"error": error, "graphs": [data_of(report) for report in new]})


def counts_of(report: Report) -> Any:
    """How often each rewrite fired, and each kernel was selected for an op."""
    kernels = Counter(f"{c.op} for {c.tokens} tokens: {c.chosen}" for c in report.kernels)
    facts = {"model": report.model, "treated": report.treated, "layers": report.num_layers}
    return facts | {"rewrites": dict(+report.matches), "kernels": dict(kernels)}


def data_of(report: Report) -> Any:
    """A report as JSON has it, without times, and source lines without their numbers."""
    found = {key: value for key, value in report.to_dict().items() if key not in LEFT_OUT}
    found["stages"] = [[stage.name, stage.changed] for stage in report.stages]
    return json.loads(re.sub(r"(\.py):\d+", r"\1", json.dumps(found, default=str)))


def _write(file: Path, data: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=1) + "\n")


def tokens(name: str) -> dict[str, Any]:
    """What each request of each mix got from each engine, and what the engine did meanwhile."""
    found: dict[str, Any] = {}
    settings, mixes = SERVED[name]
    for number in settings:
        setting = {**equality.ENGINES[number], "max_model_len": LONGEST + equality.LONGEST_ANSWER}
        options = {"strict": True, "glue": "eager", "cache": False, "layout": setting.pop("layout")}
        if "num_blocks" in setting:  # few for half of the engines, so that requests are preempted
            setting["num_blocks"] = 14 if number % 2 else 40
        config = EngineConfig(
            **{"max_num_seqs": 6, "threads": 1, "self_check": False, **setting, "options": options}
        )
        engine = Engine(config, module=model_of(name), progress=False)
        for seed in range(number, number + 10 * mixes, 10):
            requests = equality.mix(seed, engine.vocab_size or 40, LONGEST, 8)
            rng = random.Random(seed)
            for _, request, _ in requests:
                request.params = varied(request.params, rng)
            found[f"engine {number}, mix {seed}"] = equality.run_mix(engine, requests)
        stats = engine.stats()
        found[f"engine {number}, counts"] = {
            name: getattr(stats, name)
            for name in (
                "preemptions",
                "prefix_hits",
                "prefix_queries",
                "drafted",
                "accepted",
                "prompt_tokens",
                "generated_tokens",
            )
        }
    return found


def varied(params: SamplingParams, rng: random.Random) -> SamplingParams:
    """Some of these sample in another way."""
    more: list[dict[str, Any]] = [{}] * 4 + [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.7},
        {"logit_bias": {3: 5.0, 7: -20.0}},
        {"logprobs": 3},
        {"min_tokens": 1, "stop_token_ids": (5, 9)},
    ]
    return replace(params, **rng.choice(more))


# ---- comparing


class Difference(NamedTuple):
    """kind: "dump", "counts", "report", "tokens", or "sentence" for what may change."""

    kind: str
    where: str
    first: str
    second: str


def compare(
    first: Path, second: Path, only: Sequence[str] | None = None
) -> tuple[list[Difference], Counter[str]]:
    """What differs between two recordings, and the number of files of each kind. Raises ValueError
    for no recording.
    """
    names = sorted(
        {
            str(file.relative_to(folder))
            for folder in (first, second)
            for file in folder.rglob("*")
            if file.suffix in (".py", ".json")
        }
    )
    names = [name for name in names if only is None or name.partition("/")[0] in only]
    if not names:
        raise ValueError(f"{first} and {second} hold no recording: expected what --record writes")
    files: Counter[str] = Counter()
    found: list[Difference] = []
    for name in names:
        kind = {"baseline.json": "counts", "report.json": "report", "tokens.json": "tokens"}.get(
            Path(name).name, "dump"
        )
        files[kind] += 1
        a, b = (
            (folder / name).read_text() if (folder / name).exists() else None
            for folder in (first, second)
        )
        if a is None or b is None:
            found.append(
                Difference(kind, name, *("absent" if text is None else "there" for text in (a, b)))
            )
        elif kind == "dump":
            found += _of_texts(name, a, b)
        else:
            found += _of_data(kind, name, json.loads(a), json.loads(b))
    return found, files


def _of_texts(name: str, a: str, b: str) -> Iterator[Difference]:
    """The first lines that differ."""
    lines = [
        line for line in difflib.unified_diff(a.splitlines(), b.splitlines(), n=0, lineterm="")
    ][3:]
    if lines:
        gone, new = (next((line[1:] for line in lines if line[0] == sign), "") for sign in "-+")
        yield Difference("dump", name, gone, new)


def _of_data(kind: str, where: str, a: Any, b: Any, sentence: bool = False) -> Iterator[Difference]:
    match a, b:
        case dict(), dict():
            for key in a.keys() - b.keys():
                yield Difference(kind, f"{where}/{key}", str(a[key]), "absent")
            for key in a.keys() & b.keys():
                yield from _of_data(
                    kind, f"{where}/{key}", a[key], b[key], sentence or key in SENTENCES
                )
        case list(), list() if _REFUSED.search(where):  # [provider, reason] each
            same = [x[0] for x in a] == [x[0] for x in b]
            if a != b:
                yield Difference("sentence" if same else kind, where, str(a), str(b))
        case list(), list() if len(a) == len(b):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                yield from _of_data(kind, f"{where}/{i}", x, y, sentence)
        case _ if a != b:
            yield Difference("sentence" if sentence else kind, where, str(a), str(b))


def table(found: Sequence[Difference], files: Mapping[str, int], shown: int) -> str:
    counts = Counter(difference.kind for difference in found)
    lines = [f"{'':8} {'files':>6} {'differ':>7}"]
    lines += [f"{kind:8} {number:6} {counts[kind]:7}" for kind, number in sorted(files.items())]
    texts = {(d.first, d.second) for d in found if d.kind == "sentence"}
    lines.append(f"sentences changed: {len(texts)} ({counts['sentence']} places)")
    hard = [d for d in found if d.kind != "sentence"]
    soft = {(d.first, d.second): d for d in found if d.kind == "sentence"}
    for d in [*hard[:shown], *list(soft.values())[:shown]]:
        lines += ["", f"{d.kind} {d.where}", f"  - {d.first:.300}", f"  + {d.second:.300}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="DIR")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="DIR",
        nargs="+",
        help="two recordings; or one, with what is recorded now",
    )
    parser.add_argument("--only", help=f"some of {','.join(NAMES)}, with commas between them")
    parser.add_argument("--shown", type=int, default=10, help="so many differences in full")
    args = parser.parse_args()
    if (args.record is None) == (args.compare is None) or len(args.compare or [0]) > 2:
        parser.error("give --record DIR, --compare DIR or --compare DIR DIR")
    only = args.only.split(",") if args.only else NAMES
    if args.record is not None:
        if args.record.exists() and any(args.record.iterdir()):
            parser.error(f"{args.record} is not empty")
        record(args.record, only)
        return
    with tempfile.TemporaryDirectory() as scratch:
        second = args.compare[1] if len(args.compare) == 2 else Path(scratch)
        if len(args.compare) == 1:
            record(second, only)
        found, files = compare(args.compare[0], second, only)
    print(table(found, files, args.shown))
    sys.exit(any(difference.kind != "sentence" for difference in found))


if __name__ == "__main__":
    main()
