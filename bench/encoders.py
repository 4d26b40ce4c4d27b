"""One forward of encoders and decoders without a cache on a CPU: stock transformers classes eagerly,
by Inductor and by atomc.

    python bench/encoders.py --rounds 20 | tee bench/results/encoders-cpu.txt
    python bench/encoders.py --only DistilBertModel --shapes tiny --rounds 200

Weights are random and shared by the three ways. They run in this process, one forward of each in
turn; a speed-up is the median over --rounds of Inductor's (or eager's) time by atomc's in the same
round. Times are processor time of the one thread. Shapes:
    tiny   2 layers of 64 columns, 2 x 16 tokens: what a call costs besides its arithmetic
    base   4 layers of 768 columns, 4 x 128 tokens, as in the published base models
"""

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from atomc.platform import Platform

CLASSES = (
    "BertModel",
    "DistilBertModel",
    "AlbertModel",
    "RobertaModel",
    "ElectraModel",
    "MPNetModel",
    "OPTModel",
    "GPT2Model",
    "Qwen3Model",
)


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    batch: int
    tokens: int


SHAPES = {"tiny": Shape(2, 64, 4, 2, 16), "base": Shape(4, 768, 12, 4, 128)}
# What configs call their sizes; a config takes those that it has.
NAMES = {
    "layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "width": ("hidden_size", "dim", "n_embd", "embedding_size", "word_embed_proj_dim"),
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_key_value_heads"),
    "inner": ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner"),
}


def model_of(name: str, shape: Shape, dtype: torch.dtype) -> nn.Module:
    model_class = getattr(transformers, name)
    sizes = shape._asdict() | {"inner": 4 * shape.width}
    known = vars(model_class.config_class()) | model_class.config_class.attribute_map
    given: dict[str, Any] = {
        key: sizes[size] for size, keys in NAMES.items() for key in keys if key in known
    }
    if "head_dim" in known:
        given["head_dim"] = shape.width // shape.heads
    torch.manual_seed(0)
    config = model_class.config_class(vocab_size=1024, use_cache=False, **given)
    return model_class(config).to(dtype).eval().requires_grad_(False)  # type: ignore[no-any-return]


def ways_of(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """A forward of each way, its first call done and its result compared with eager's."""

    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids).last_hidden_state  # type: ignore[no-any-return]

    torch._dynamo.reset()
    calls: dict[str, Callable[[], Tensor]] = {"eager": lambda: forward(ids)}
    for way in ("inductor", "atom"):
        # A code object of its own: Dynamo keeps what it compiled with the code.
        own = types.FunctionType(
            forward.__code__.replace(), globals(), way, None, forward.__closure__
        )
        calls[way] = partial(torch.compile(own, backend=way, dynamic=False), ids)
        found, wanted = calls[way](), calls["eager"]()
        tolerance = 1e-4 if wanted.dtype == torch.float32 else 0.05
        torch.testing.assert_close(
            found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
        )
    return calls


def measure(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each way, interleaved, after three that do not count."""
    times: dict[str, list[float]] = {way: [] for way in calls}
    for turn in tqdm(range(rounds + 3), desc="timing", disable=not sys.stderr.isatty()):
        for way, call in calls.items():
            start = time.thread_time()
            call()
            if turn >= 3:
                times[way].append(time.thread_time() - start)
    return times


def ratio(other: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(other, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    split = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--only", type=split, default=CLASSES, help="of " + ",".join(CLASSES))
    parser.add_argument("--shapes", type=split, default=tuple(SHAPES))
    parser.add_argument("--dtypes", type=split, default=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=30, help="ten times as many of tiny shapes")
    args = parser.parse_args()
    if unknown := [name for name in args.shapes if name not in SHAPES]:
        parser.error(f"no shape {unknown[0]!r}: expected some of {','.join(SHAPES)}")
    torch.set_num_threads(1)
    here = Platform.detect("cpu")
    print(" ".join(["python", *sys.argv]))
    print(
        f"{here.name}, {', '.join(sorted(here.cpu_flags))}; one thread, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )
    print(f"{'class':18}{'shape':8}{'dtype':10}{'eager ms':>10}{'by eager':>10}{'by inductor':>13}")
    for shape_name in args.shapes:
        shape = SHAPES[shape_name]
        ids = torch.randint(0, 1024, (shape.batch, shape.tokens))
        for dtype in args.dtypes:
            for name in args.only:
                with torch.inference_mode():
                    calls = ways_of(model_of(name, shape, getattr(torch, dtype)), ids)
                    rounds = args.rounds * (10 if shape_name == "tiny" else 1)
                    times = measure(calls, rounds)
                print(
                    f"{name:18}{shape_name:8}{dtype:10}{1e3 * statistics.median(times['eager']):10.2f}"
                    f"{ratio(times['eager'], times['atom']):10.2f}"
                    f"{ratio(times['inductor'], times['atom']):13.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
