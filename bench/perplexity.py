"""Perplexity of a model on its held_out.txt in each quantization scheme, compiled by atomc.

    python bench/perplexity.py atomc/demo
    python bench/perplexity.py demo-moe --text bench/results/perplexity-moe-cpu.txt
    python bench/perplexity.py demo-moe --schemes fp8,int4 --tokens 4096

The folder is one that bench/train_demo.py writes. Windows of --context tokens start at every half
of that, and each scores what is new in it.

A scheme quantizes all linear layers and experts except routers and the head. 8 bits are compared
with bf16. 4 bits are compared with their dequantized reference: the same model in plain PyTorch
with the values that the codes stand for, in fp32. The reference of mxfp4 quantizes bf16 activations
as the scheme does; since the kernel of attention in a compiled graph rounds differently, and MXFP4
carries any change of rounding far, this scheme is also run uncompiled and compared so. The exit code is 1 if a scheme
exceeds its bound.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.loading.loader import load
from atomc.ops.scaled_linear import mxfp4_values
from atomc.quantization import QuantizedExperts, QuantizedLinear, apply
from atomc.quantization.scheme import Mxfp4, Scheme

# The largest relative difference: to bf16, or of 4 bits to their reference.
BOUNDS = {
    "fp8": 0.01,
    "fp8_per_token": 0.01,
    "fp8_block": 0.01,
    "int8": 0.02,
    "int4": 0.005,
    "mxfp4": 0.005,
    "mxfp4_a16": 0.005,
    "nvfp4_a16": 0.005,
}
FOUR_BITS = ("int4", "mxfp4", "mxfp4_a16", "nvfp4_a16")


class ReferenceLinear(nn.Module):
    """The layer that a quantized one stands for. x [..., K] -> [..., N] in x.dtype."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.weight, self.scheme = layer.dequantized(), layer.method.scheme

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(activation(x, self.scheme), self.weight).to(x.dtype)


class ReferenceExperts(nn.Module):
    """The experts that quantized ones stand for, one after another; their gate is silu."""

    def __init__(self, layer: QuantizedExperts) -> None:
        super().__init__()
        assert layer.gate["activation"] == "silu" and not layer.spec.has_bias
        self.w13, self.w2 = (layer.dequantized(name) for name in ("gate_up_proj", "down_proj"))
        self.scheme = layer.method.scheme

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids and weights [T, k] -> [T, H] in x.dtype, summed in fp32."""
        y = torch.zeros(x.shape, dtype=torch.float32)
        for e, (w13, w2) in enumerate(zip(self.w13, self.w2, strict=True)):
            rows, places = (ids == e).nonzero(as_tuple=True)
            gate, up = F.linear(activation(x[rows], self.scheme), w13).to(x.dtype).chunk(2, -1)
            out = F.linear(activation(F.silu(gate) * up, self.scheme), w2).to(x.dtype)
            y.index_add_(0, rows, out.float() * weights[rows, places, None])
        return y.to(x.dtype)


def activation(x: Tensor, scheme: Scheme) -> Tensor:
    """The values in fp32 that the scheme multiplies."""
    if isinstance(scheme, Mxfp4) and scheme.activation == "mxfp4":
        return mxfp4_values(*torch.ops.atom.quant_mxfp4(x, scheme.rounding))
    return x.float()


def quantized(folder: Path, scheme: str) -> nn.Module:
    return load(folder, quantization=scheme, dtype=torch.bfloat16, progress=False)


def reference(folder: Path, scheme: str) -> nn.Module:
    """The model of the scheme with plain layers in place of the quantized ones."""
    # Codes of activations depend on their rounding to bf16.
    dtype = torch.bfloat16 if scheme == "mxfp4" else torch.float32
    model = load(folder, dtype=dtype, progress=False)
    for name, layer in quantized(folder, scheme).named_modules():
        if isinstance(layer, QuantizedLinear):
            apply.replace(model, name, ReferenceLinear(layer))
        elif isinstance(layer, QuantizedExperts):
            apply.replace(model, name, ReferenceExperts(layer))
    return model


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    made: nn.Module = torch.compile(
        model, backend="atom", dynamic=False, options={"strict": True, "glue": "eager"}
    )
    return made


def perplexity(model: nn.Module, ids: Tensor, context: int) -> float:
    """exp(mean loss) over windows of `context` tokens; what is left at the end is not scored."""
    losses, stride = [], context // 2
    for start in range(0, len(ids) - context + 1, stride):
        window = ids[start : start + context]
        with torch.inference_mode():
            logits = model(window, torch.arange(context))[:-1].float()
        loss = F.cross_entropy(logits, window[1:], reduction="none")
        losses.append(loss[-stride if start else 0 :])
    return math.exp(torch.cat(losses).double().mean())


def read(folder: Path, tokens: int | None) -> Tensor:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor(tokenizer.encode((folder / "held_out.txt").read_text()).ids[:tokens])


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    ids, lines, missed = read(args.folder, args.tokens), [], []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"python bench/perplexity.py {shlex.join(argv)}")
    say(f"{len(ids)} tokens, torch {torch.__version__}, {torch.get_num_threads()} threads")
    plain = {
        name: perplexity(
            compiled(load(args.folder, dtype=dtype, progress=False)), ids, args.context
        )
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    say(
        f"{'':14}{'compiled':>9}{'to bf16':>9}{'uncompiled':>12}{'reference':>11}{'to it':>9}"
        f"{'bound':>7}"
    )
    for name, value in plain.items():
        say(f"{name:14}{value:9.3f}{value / plain['bf16'] - 1:+9.2%}")
    for scheme in args.schemes:
        value = perplexity(compiled(quantized(args.folder, scheme)), ids, args.context)
        change = value / plain["bf16"] - 1
        line, bound = f"{scheme:14}{value:9.3f}{change:+9.2%}", BOUNDS[scheme]
        if scheme == "mxfp4":
            value = perplexity(quantized(args.folder, scheme), ids, args.context)
            line += f"{value:12.3f}"
        if scheme in FOUR_BITS:
            meant = perplexity(reference(args.folder, scheme), ids, args.context)
            change = value / meant - 1
            line = f"{line:44}{meant:11.3f}{change:+9.2%}"
        say(f"{line:64}{bound:7.1%}{'' if abs(change) <= bound else '  MISSED'}")
        missed += [scheme] if abs(change) > bound else []
    if args.text:
        args.text.write_text("\n".join(lines) + "\n")
    if missed:
        raise SystemExit(1)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="model, tokenizer.json and held_out.txt")
    parser.add_argument(
        "--schemes",
        type=lambda text: text.split(","),
        default=list(BOUNDS),
        help=f"of {', '.join(BOUNDS)}; default: all",
    )
    parser.add_argument("--tokens", type=int, help="of the text; default: all")
    parser.add_argument("--context", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--text", type=Path, metavar="FILE", help="where to write the table")
    args = parser.parse_args(argv)
    if unknown := [scheme for scheme in args.schemes if scheme not in BOUNDS]:
        parser.error(f"unknown scheme {unknown[0]!r}: choose from {', '.join(BOUNDS)}")
    return args


if __name__ == "__main__":
    main()
