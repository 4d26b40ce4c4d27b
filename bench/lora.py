"""Time of one decode step with LoRA adapters: CUDA graphs of the program that has room for them,
beside those of the program without, on random weights.

    python bench/lora.py --model 8b --json bench/results/lora-h100.json
    python bench/lora.py --model 8b --batches 1 --profile    # the kernels of a step with an adapter
    python bench/lora.py --tiles    # of the kernels for few rows, at the layers of the 8b model

All linear layers have adapters of --rank. Rows have none, all have one, or they have --adapters in
turn. A step is timed as in bench/decode.py; over is its time by that of the program without
adapters. --tiles: us of the adapters of each linear layer, and of all in a decoder layer.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from decode import BLOCK, milliseconds, profile, step_of
from kernels import microseconds, normal
from model_shapes import MODELS

from atomc.loading.loader import load
from atomc.ops.inputs import TEXT, LoraShape
from atomc.ops.state import groups_of
from atomc.program import Program, compile_model
from atomc.quantization.scheme import ONLINE
from atomc.runtime.execution.input_batch import StepShape
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.step import Admission, ScheduledStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def programs(args: argparse.Namespace) -> tuple[Program, Program]:
    """The program without adapters, and that with random ones."""
    config = MODELS[args.model]
    if args.layers:
        config = {**config, "num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = load(
            folder,
            dtype=torch.bfloat16,
            device=DEVICE,
            load_format="dummy",
            quantization=args.quantization,
            progress=False,
        )
    shape = LoraShape(args.adapters, args.rank)
    plain, adapted = (
        compile_model(model, {"glue": args.glue}, owned=True, takes=takes)
        for takes in (TEXT, replace(TEXT, lora=shape))
    )
    for path in adapted.lora.paths:
        for layer in adapted.lora.layers(path):
            layer.lora_a.normal_(std=0.02)
            layer.lora_b.normal_(std=0.02)
    return plain, adapted


def with_adapters(step: ScheduledStep, number: Callable[[int], int | None]) -> ScheduledStep:
    """The step, sequence s of which has adapter number(s)."""

    def admission(slot: int) -> Admission:
        return Admission(SamplingParams(), 0, 1, frozenset(), lora=number(slot))

    return step._replace(
        chunks=tuple(chunk._replace(admission=admission(chunk.slot)) for chunk in step.chunks)
    )


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plain, adapted = programs(args)
    blocks = -(-(args.context + 64) // BLOCK)
    most = max(args.batches)
    runner = Runner(
        Programs({"adapters": adapted, "text": plain}),
        num_blocks=most * blocks,
        block_size=BLOCK,
        max_num_seqs=most,
        max_num_rows=most,
        max_columns=blocks,
    )
    for caches in runner.caches:
        for cache in caches.values():
            cache.normal_()
    shapes = {batch: StepShape(batch, batch, batch, blocks) for batch in args.batches}
    runner.capture(list(shapes.values()))
    assert all(each.graphs for each in runner.variants.values()), runner.why_eager
    rows: dict[str, Callable[[int], int | None]] = {
        "no row": lambda s: None,
        "one adapter": lambda s: 0,
        f"{args.adapters} adapters": lambda s: s % args.adapters,
    }
    for batch, shape in shapes.items():
        step = step_of([args.context + 1] * batch, [1] * batch, blocks, len(groups_of(plain.specs)))
        base = 0.0
        for name, number in {"without": rows["no row"], **rows}.items():
            if batch == 1 and name == f"{args.adapters} adapters":
                continue
            runner.logits(with_adapters(step, number))
            variant = runner.variants["text" if name == "without" else "adapters"]
            captured = variant.graphs.captured[shape]
            ms = milliseconds(lambda c=captured: c.replay().argmax(-1), args.steps)
            base = base or ms
            if args.profile and name in ("without", "one adapter"):
                print(f"batch {batch}, {name}", file=sys.stderr)
                profile(captured.replay)
            yield {"batch": batch, "adapters": name, "ms": ms, "over": ms / base}


def layers(model: str) -> dict[str, tuple[int, list[int]]]:
    """Inputs, and outputs of the merged layers, of the linear layers of a decoder layer."""
    config = MODELS[model]
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    return {
        "qkv": (hidden, [queries, keys, keys]),
        "o": (queries, [hidden]),
        "gate_up": (hidden, [inner, inner]),
        "down": (inner, [hidden]),
    }


def tiles(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time of the adapters of a decoder layer with each tile, rows having adapters in turn."""
    from atomc.kernels.triton.launch.tiles import LORA_FEW
    from atomc.kernels.triton.linear import lora, lora_few

    def arguments(rows: int, inputs: int, widths: list[int]) -> dict[str, Any]:
        thin, outputs = len(widths) * args.rank, sum(widths)
        return {
            "y": normal(rows, outputs),
            "x": normal(rows, inputs),
            "a": normal(args.adapters, thin, inputs),
            "b": normal(args.adapters, args.rank, outputs),
            "rows": torch.arange(rows, device=DEVICE, dtype=torch.int32) % args.adapters,
            "ends": lora.ends(widths, outputs),
        }

    first = LORA_FEW.choose(torch.device(DEVICE), 1)
    choices = [first]
    choices += [
        first._replace(thin=thin, inputs=inputs, warps=warps)
        for thin, inputs, warps in product((4, 8, 16), (512, 1024, 2048), (2, 4))
    ]
    choices += [
        first._replace(products=products, expand_warps=warps)
        for products, warps in product((1024, 2048, 4096, 8192), (1, 2, 4))
    ]
    for rows in (batch for batch in args.batches if batch <= lora_few.MAX_ROWS):
        sets = {
            name: [arguments(rows, inputs, widths) for _ in range(4)]
            for name, (inputs, widths) in layers(args.model).items()
        }
        for tile in choices:
            call = partial(lora_few.lora_linear, tile=tile)
            us = {name: microseconds(call, given, 32, 9) for name, given in sets.items()}
            yield {"batch": rows, "tile": tuple(tile), **us, "layer": sum(us.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", choices=sorted(MODELS))
    parser.add_argument(
        "--batches", default="1,8,64", type=lambda text: [int(b) for b in text.split(",")]
    )
    parser.add_argument("--rank", default=16, type=int)
    parser.add_argument("--adapters", default=8, type=int, help="loaded at once (8)")
    parser.add_argument("--context", default=1024, type=int)
    parser.add_argument("--steps", default=50, type=int)
    parser.add_argument("--glue", default="auto", choices=["eager", "inductor", "auto"])
    parser.add_argument(
        "--quantization", choices=sorted(ONLINE), help="how linear layers are quantized (not)"
    )
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument(
        "--tiles", action="store_true", help="time the tiles of the kernels for few rows"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--json", help="append the figures to this file, one a line")
    args = parser.parse_args()
    if DEVICE == "cpu":
        sys.exit("torch sees no GPU: CUDA graphs are timed")
    lines = []
    for figure in tiles(args) if args.tiles else figures(args):
        line = {"model": args.model, "context": args.context, "rank": args.rank, **figure}
        if args.layers:
            line["layers"] = args.layers
        if args.quantization:
            line["quantization"] = args.quantization
        lines.append(line)
        print(
            "  ".join(
                f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
                for name, value in line.items()
            ),
            flush=True,
        )
    for batch in {line["batch"]: None for line in lines} if args.tiles else ():
        ranked = sorted(
            (line for line in lines if line["batch"] == batch), key=lambda line: line["layer"]
        )
        print(batch, "  ".join(f"{line['tile']} {line['layer']:.2f}" for line in ranked[:3]))
    if args.json:
        with open(args.json, "a") as file:
            for line in lines:
                about = {
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "command": " ".join(["python", *sys.argv]),
                }
                file.write(json.dumps({**line, **about}) + "\n")


if __name__ == "__main__":
    main()
