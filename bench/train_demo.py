"""Train the demo model that atomc ships: a Qwen3 of a few megabytes that writes English, in Hugging
Face layout.

Stock transformers and a plain torch loop: tokenizer, training, held-back text and its perplexity,
in one run. atomc/demo/README.md says which text was used and how to get it.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

EXAMPLES = """examples:
  the shipped model:      python bench/train_demo.py --text corpus/*.txt --out atomc/demo
  four experts:           python bench/train_demo.py --text corpus/*.txt --out demo-moe --experts 4
  does it run at all:     python bench/train_demo.py --text corpus/*.txt --steps 3 --batch 1 --context 256
  only the perplexity:    python bench/train_demo.py --evaluate atomc/demo
"""
END = "<|endoftext|>"
BETWEEN_DOCUMENTS = "\n\n\n"
EVALUATION_CONTEXT, EVALUATION_STRIDE, SLICE_TOKENS = 1024, 512, 4096
# As in Qwen2 and Qwen3: Hugging Face may rebuild the tokenizer from the model type, and both must
# split alike.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main() -> None:
    args = arguments()
    logging.disable_progress_bar()
    if args.evaluate:
        record_perplexity(args.evaluate, args.device)
        return

    texts, held_out = hold_out([path.read_text() for path in args.text], args.held_out)
    documents = [
        part.strip() for text in texts for part in text.split(BETWEEN_DOCUMENTS) if part.strip()
    ]
    tokenizer = train_tokenizer(documents, args.vocab)
    tokens = torch.tensor(
        [t for one in tokenizer.encode_batch([END + d for d in documents]) for t in one.ids]
    )
    held_out_tokens = torch.tensor(tokenizer.encode(held_out).ids)
    print(
        f"{sum(map(len, texts)):,} characters in {len(documents)} documents, {len(tokens):,} "
        "tokens to train on"
    )

    torch.manual_seed(args.seed)
    config = model_config(args.vocab, args.layers, args.experts)
    model = build(config).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokens, held_out_tokens, args)

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "held_out.txt").write_text(held_out)
    save(args.out, model, config, tokenizer)
    record_perplexity(args.out, args.device)
    print_samples(args.out, args.device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="plain text; two empty lines part documents",
    )
    job.add_argument(
        "--evaluate",
        type=Path,
        metavar="FOLDER",
        help="only measure that model, write perplexity.json",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab", type=int, default=3072, help="tokens, a multiple of 256 (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=3, help="default: %(default)s, which keeps bf16 below 8 MB"
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="experts per layer, two of them active; 0 is dense"
    )
    parser.add_argument("--steps", type=int, default=5000, help="default: %(default)s")
    parser.add_argument(
        "--batch", type=int, default=16, help="sequences per step (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens per sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.15, help="while training (default: %(default)s)"
    )
    parser.add_argument("--weight-decay", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument(
        "--held-out", type=float, default=0.005, help="part of each text kept back (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: %(default)s",
    )
    args = parser.parse_args()
    if args.vocab % 256:
        parser.error(f"--vocab {args.vocab} is not a multiple of 256")
    return args


def hold_out(texts: list[str], fraction: float) -> tuple[list[str], str]:
    """The texts without, and a text of, whole paragraphs from two thirds into each."""
    kept, held_out = [], []
    for text in texts:
        start = text.index("\n\n", 2 * len(text) // 3)
        end = text.index("\n\n", start + int(fraction * len(text)))
        kept.append(text[:start] + BETWEEN_DOCUMENTS + text[end:])
        held_out.append(text[start:end].strip())
    return kept, BETWEEN_DOCUMENTS.join(held_out) + "\n"


def train_tokenizer(documents: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), behavior="isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}: more text, "
            "or --vocab"
        )
    return tokenizer


def model_config(vocab_size: int, num_layers: int, num_experts: int) -> dict:
    """config.json as a Qwen3 checkpoint has it; END is token 0, as the tokenizer's first special
    token.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": True,
        "dtype": "bfloat16",
    }
    if num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
        }
    return config


def build(config: dict) -> nn.Module:
    """A fresh model in float32, in which to train."""
    fields = {
        name: value
        for name, value in config.items()
        if name not in ("architectures", "model_type", "dtype")
    }
    if config["model_type"] == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**fields)).float()
    # The router needs its balancing loss while it trains, and only then.
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields | {"output_router_logits": True})).float()


def train(model: nn.Module, tokens: Tensor, held_out: Tensor, args: argparse.Namespace) -> None:
    """Leaves the weights in `model` that had the lowest loss on the held-back text."""
    add_dropout(model, args.dropout)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_cosine(step, args.steps)
    )
    batches = random_windows(tokens.to(args.device), args.context, args.batch, args.seed)
    held_out = held_out.to(args.device)
    autocast = torch.autocast(torch.device(args.device).type, torch.bfloat16)
    check_every = max(1, args.steps // 30)
    best, best_weights = math.inf, None

    started = time.perf_counter()
    progress = tqdm(range(1, args.steps + 1), mininterval=2)
    for step in progress:
        with autocast:
            loss = model(input_ids=(batch := next(batches)), labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        if step % check_every == 0 or step == args.steps:
            with autocast:
                held_out_loss = math.log(perplexity(model, held_out, args.context, args.context))
            progress.write(f"step {step}: loss {loss.item():.4f}, held out {held_out_loss:.4f}")
            if held_out_loss < best:
                best, best_step = held_out_loss, step
                best_weights = {
                    name: value.cpu().clone() for name, value in model.state_dict().items()
                }
    print(f"{time.perf_counter() - started:.0f} s; kept step {best_step}, held-out loss {best:.4f}")
    model.load_state_dict(best_weights)


def add_dropout(model: nn.Module, probability: float) -> None:
    """Qwen3 has no such dropout, but it sees its text once and this model seventy times."""

    def drop(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, norm weights do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def warmup_then_cosine(step: int, num_steps: int) -> float:
    warmup = min(100, num_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


def random_windows(tokens: Tensor, context: int, batch: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context, device=tokens.device)
    while True:
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        yield tokens[starts.to(tokens.device) + within]


def save(folder: Path, model: nn.Module, config: dict, tokenizer: tokenizers.Tokenizer) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    # transformers writes its own version's spelling of the config; this one is read by all
    # versions.
    write_json(folder / "config.json", config)
    # So small a model soon repeats itself when it takes the likeliest token each time.
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0} | sampling,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        # It was never taught to chat: a conversation is text to go on with.
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}",
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def record_perplexity(folder: Path, device: str) -> None:
    """Measure the saved model on its held_out.txt, in float32 and bfloat16; write and print
    perplexity.json.
    """
    text = (folder / "held_out.txt").read_text()
    tokens = torch.tensor(
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    )
    result = {
        "text": "held_out.txt",
        "bytes": len(text.encode()),
        "tokens": len(tokens),
        "context": EVALUATION_CONTEXT,
        "stride": EVALUATION_STRIDE,
        "slice": {"tokens": SLICE_TOKENS},
        "command": f"python bench/train_demo.py --evaluate {folder}",
    }
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype).to(device)
        for part, into in ((tokens, result), (tokens[:SLICE_TOKENS], result["slice"])):
            value = perplexity(model, part.to(device), EVALUATION_CONTEXT, EVALUATION_STRIDE)
            into[str(dtype).removeprefix("torch.")] = round(value, 4)
    result["bits_per_byte"] = round(math.log2(result["float32"]) * len(tokens) / result["bytes"], 4)
    write_json(folder / "perplexity.json", result)
    print(json.dumps(result, indent=2))


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    moe = json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"
    return (
        (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)
        .from_pretrained(folder, dtype=dtype)
        .eval()
    )


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, context: int, stride: int) -> float:
    """exp(mean loss). A window of `context` tokens starts at every `stride`; it scores what no
    earlier one has scored.

    The first token has nothing before it and is not scored.
    """
    training = model.training
    model.eval()
    total, done = 0.0, 1
    for start in range(0, len(tokens), stride):
        window = tokens[start : start + context]
        end = start + len(window)
        losses = F.cross_entropy(
            model(window[None]).logits[0, :-1].float(), window[1:], reduction="none"
        )
        total += losses[done - end :].double().sum().item()
        done = end
        if end == len(tokens):
            break
    model.train(training)
    return math.exp(total / (len(tokens) - 1))


def print_samples(folder: Path, device: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load(folder, torch.bfloat16).to(device)
    for prompt in (END, "The old house", "She looked at him and said", "In the beginning"):
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        out = model.generate(ids, max_new_tokens=120)
        print(f"--- {tokenizer.decode(out[0].tolist())}")


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
