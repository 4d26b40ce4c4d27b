"""Every causal language model of transformers, tiny and with random weights: compiled, and served.

    python bench/architectures.py                             # all
    python bench/architectures.py --only llama,gpt2,marian    # some, by model_type
    python bench/architectures.py --rows rows.jsonl --text bench/results/architectures-cpu.txt

What the file of --rows has already is not run again.

A model has two layers of 64 columns, in fp32, and weights large enough for positions to matter. Two
columns of the table:

compiled   torch.compile(model, backend="atom") against eager, one forward: the largest difference
           relative to the largest logit; "equal" below 1e-4
served     greedy tokens of three prompts at once, through LLM with steps of 8 tokens, against
           transformers' `generate` of each alone: "equal", "differs", or "refused: " and the
           sentence that a user gets; of a class that only the self-check refuses also what it would
           have answered

Each architecture has a process of its own, so that one that crashes or hangs is a row.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import atomc.compiler.trace_model  # noqa: F401
from atomc import LLM
from atomc.passes import PIPELINE
from atomc.runtime.requests.sampling_params import SamplingParams

# What configs call their sizes; each gets those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "n_inner", "ffn_hidden_size",
                     "d_inner", "shared_intermediate_size", "dim_ff", "shared_expert_intermediate_size",
                     "intermediate_size_mlp"), 96),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 8, "rotary_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0, "laurel_rank": 8, "mamba_d_state": 8, "ssm_state_size": 8,
    "state_size": 8, "use_cache": True, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
# Where the sizes above do not fit together.
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "dots3_note_text": {"num_key_value_heads": 4},
    "mamba2": {"head_dim": 32},
    "moshi": {
        "sliding_window": 128
    },  # a cache of a window would not fit its forward, which attends to all
    "zaya": {"num_experts_per_tok": 1},
}
REWRITES = [rewrite for each in PIPELINE for rewrite in each.rewrites]
MOST_PARAMETERS = 30_000_000
PROMPTS = (
    [5, 9, 14, 22, 31, 7, 45, 60, 61, 18, 33, 90, 11],
    [70, 3, 44, 12, 8],
    [101, 56, 77, 23, 19, 6, 88, 91, 40],
)
NEW_TOKENS = 8
EQUAL = 1e-4
Row = dict[str, Any]  # of a table; plain data


def names() -> list[str]:
    """The model_types of causal language models, one for each class."""
    return sorted({name: model_type for model_type, name in CLASSES.items()}.values())


def build(model_type: str) -> Any:
    """The class's model with a tiny config. Raises ValueError for one that stays large, and what
    its forward raises where the sizes do not fit together."""
    config_class = CONFIG_MAPPING[model_type]
    has = config_class()
    sizes = _sizes(has) | SPECIAL.get(model_type, {})
    for part in ("text_config", "decoder_config", "decoder"):
        inner = getattr(has, part, None)
        if isinstance(inner, transformers.PretrainedConfig):
            sizes[part] = _sizes(inner)
    config = config_class(**sizes)
    cls = getattr(transformers, CLASSES[model_type])
    with torch.device("meta"):
        count = sum(weight.numel() for weight in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters with this config")
    torch.manual_seed(0)
    model = (
        cls._from_config(config_class(**sizes), dtype=torch.float32).eval().requires_grad_(False)
    )
    for weight in model.parameters():
        if weight.dim() >= 2:  # not 0.02, so that scores and positions count
            weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    # Whether the sizes fit together.
    model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False)
    return model


def _sizes(config: Any) -> dict[str, Any]:
    """Those of SIZES that such a config has and that can be set."""
    of_class = {name: getattr(type(config), name, None) for name in SIZES}
    fixed = {
        name for name, item in of_class.items() if isinstance(item, property) and item.fset is None
    }
    sizes = {
        name: value for name, value in SIZES.items() if name in vars(config) and name not in fixed
    }
    latent = {
        "num_key_value_heads": 4,
        "head_dim": 8,
    }  # one latent for all heads; head_dim is of the rotated part
    return sizes | {
        name: value for name, value in latent.items() if name in sizes and "kv_lora_rank" in sizes
    }


def compiled(model: Any) -> str:
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        out = torch.compile(model, backend="atom", options={"glue": "eager", "cache": False})(
            input_ids=ids, use_cache=False
        ).logits
    error = float((out - expected).abs().max() / expected.abs().max())
    return "equal" if error < EQUAL else f"differs: {error:.1e}"


def generated(model: Any) -> list[list[int]]:
    """What transformers answers to each prompt alone; where its `generate` fails, what its forward
    without a cache says.
    """
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        try:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                num_beams=1,
            )
        except Exception:
            out = ids
            for _ in range(NEW_TOKENS):
                logits = model(input_ids=out, use_cache=False).logits[:, -1]
                logits[:, model.config.get_text_config().eos_token_id] = -torch.inf
                out = torch.cat([out, logits.argmax(-1, keepdim=True)], -1)
        found.append(out[0, len(prompt) :].tolist())
    return found


def served(model: Any, expected: list[list[int]], self_check: bool = True) -> str:
    try:
        llm = LLM(
            model,
            options={"glue": "eager", "cache": False},
            max_num_seqs=4,
            max_num_batched_tokens=8,
            max_model_len=64,
            kv_bytes=2**24,
            self_check=self_check,
            progress=False,
        )
    except ValueError as error:
        checked = "computes something else" in str(error)
        unchecked = (
            f" [unchecked it {served(model, expected, False).partition(':')[0]}]" if checked else ""
        )
        return f"refused: {error}{unchecked}"
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    answers = [list(answer.token_ids) for answer in llm.generate(list(PROMPTS), params)]
    return "equal" if answers == expected else f"differs: {answers} instead of {expected}"


def tried(run: Callable[..., str], *args: Any) -> str:
    """What `run` returns, or what it raised: any exception of any library is a row."""
    try:
        return run(*args)
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def row(model_type: str) -> Row:
    """What became of one architecture, in this process."""
    try:
        model = build(model_type)
    except Exception as error:  # a config that does not fit together is no fault of ours
        return {
            "name": model_type,
            "not built": f"{type(error).__name__}: {error}"[:300].replace("\n", " "),
        }
    found = {"name": model_type, "class": type(model).__name__, "compiled": tried(compiled, model)}
    return found | {"served": tried(lambda: served(model, generated(model)))}


def traced() -> list[tuple[int, int]]:
    """The patterns that are traced: the number of a rewrite, and of its case."""
    return [
        (i, j)
        for i, rewrite in enumerate(REWRITES)
        for j, case in enumerate(rewrite.cases)
        if case in rewrite.patterns
    ]


def in_process(name: str, row: Callable[[str], Row], seconds: float, more: bool) -> Row:
    """The row of one architecture, by a process of its own: a copy of this one, which has imported
    all and run nothing. Without an answer a row with the reason in "failed".

    more  others follow: the patterns that it traced are traced here, too, for these
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: there.send((row(name), traced())))
    child.start()
    there.close()
    try:
        if not here.poll(seconds):
            return {"name": name, "failed": f"no answer in {seconds:.0f} s"}
        found: Row
        found, used = here.recv()
        for i, j in used if more else ():
            REWRITES[i].traced(REWRITES[i].cases[j])
        return found
    except EOFError:
        child.join()
        return {"name": name, "failed": f"exit code {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def survey(
    chosen: Iterable[str], row: Callable[[str], Row], seconds: float, file: Path | None
) -> list[Row]:
    """The rows of these architectures, sorted by name. Those that the file has are not run again,
    others are added to it.
    """
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ["ATOMC_STRICT"] = "1"
    lines = file.read_text().splitlines() if file and file.exists() else []
    rows = {each["name"]: each for each in map(json.loads, lines)}
    names = [name for name in chosen if name not in rows]
    for name in names:
        start = time.perf_counter()
        rows[name] = in_process(name, row, seconds, more=name != names[-1])
        if file:
            with file.open("a") as added:
                added.write(json.dumps(rows[name]) + "\n")
        print(f"{time.perf_counter() - start:5.1f} s  {rows[name]}", file=sys.stderr, flush=True)
    return [rows[name] for name in sorted(rows)]


def survey_options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="model_types, with commas between them")
    parser.add_argument(
        "--rows", type=Path, help="a file of rows, one JSON object a line: these are not run again"
    )
    parser.add_argument("--text", type=Path, help="write the table there as well")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one architecture")
    return parser


def kind(text: str) -> str:
    return (
        text
        if text == "equal"
        else text.partition(":")[0]
        if text.startswith(("refused", "differs"))
        else "failed"
    )


def table(rows: list[Row]) -> str:
    """The rows as text, and how many of each kind there are."""
    built = [each for each in rows if "not built" not in each]
    lines = [f"{len(built)} architectures"]
    for column in ("compiled", "served"):
        counts = Counter(kind(each[column]) for each in built)
        lines.append(
            f"{column}: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())
        )
    lines += ["", f"{'model_type':24} {'compiled':16} served"]
    lines += [f"{each['name']:24} {each['compiled'][:60]:16} {each['served']}" for each in built]
    missing = [each for each in rows if "not built" in each]
    lines += ["", f"{len(missing)} more have no tiny config here:"] * bool(missing)
    return "\n".join([*lines, *(f"{each['name']:24} {each['not built']}" for each in missing)])


def main() -> None:
    args = survey_options(__doc__).parse_args()
    chosen = args.only.split(",") if args.only else names()
    rows = [
        {"class": "", "compiled": each["failed"], "served": "-"} | each
        if "failed" in each
        else each
        for each in survey(chosen, row, args.seconds, args.rows)
    ]
    text = table(rows)
    print(text)
    if args.text:
        args.text.write_text(text + "\n")
    sys.exit(any(kind(each.get("served", "equal")) == "differs" for each in rows))


if __name__ == "__main__":
    main()
