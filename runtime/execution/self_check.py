"""Self-check: compares a transformers class in the runtime with its own forward.

The runtime passes position_ids and calls a class once for the new tokens of many sequences. A class
that ignores positions, or mixes tokens other than by attention, compiles but computes wrong logits.
This cannot be seen from its code (ALiBi needs no positions either), so the check compares numbers:
two short sequences run through the compiled program, in chunks, batched and token by token, and at
once through the class's own forward, with its own attention and the same weights. Where latent
attention multiplies rows by a quantized kv_b_proj without quantizing them, so does the class.
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from atomc.cache.fingerprint import MODEL_CODE, digest, file_digest, sources_in
from atomc.cache.store import DamagedEntry, Entry
from atomc.errors import first_line
from atomc.ops import REGISTRY
from atomc.ops.op_traits import Kind
from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.options import Options
from atomc.parallel.vocab import LogitsOfRank
from atomc.program import Program, state_dtype
from atomc.quantization.linear import QuantizedLinear
from atomc.report.report import Report
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.scheduling.step import Chunk, ScheduledStep
from atomc.stock.adapter import StockModel
from atomc.stock.implementations import attention_of
from atomc.stock.logit_agreement import (
    IN_8_BITS,
    ROOM,
    ROUNDING,
    agreed,
    difference,
    plain_tokens,
    rounding_noise,
)

# Kind of rows and number of new tokens, for each step and each of the two sequences.
STEPS = (
    (("a prompt alone", 9), ("a second sequence", 5)),
    (("after a chunk border", 11), ("after a chunk border", 6)),
    (("a decode step", 1), ("a decode step", 1)),
    (("a decode step", 1), ("a decode step", 1)),
    (("a decode step", 1), ("a decode step", 1)),
)
LENGTHS = tuple(sum(step[i][1] for step in STEPS) for i in range(2))
PAGE = 32  # block size, for layouts whose blocks hold a whole sequence

# Some models amplify roundings: experts in many layers, or quantized activations at a rounding
# boundary. If the limit is exceeded, the class's own forward is repeated with noise in its
# embeddings, of the size of the roundings of all layers. The limit is then ABOVE_OWN times the
# resulting difference; above MOST, the check is inconclusive.
ABOVE_OWN = 3.0
MOST = 0.7


@dataclass(frozen=True)
class Verdict:
    """Result of a self-check.

    errors    (kind of row, relative error of the logits), to be at most limit
    why_not   why it was not run
    """

    errors: tuple[tuple[str, float], ...] = ()
    limit: float = 0.0
    why_not: str = ""

    @property
    def right(self) -> bool:
        return all(error <= self.limit for _, error in self.errors)  # NaN is not right

    def numbers(self) -> str:
        return ", ".join(f"{error:.1e} {kind}" for kind, error in self.errors)


@dataclass(frozen=True)
class OwnForward:
    """What a class's own forward computes.

    logits    [T, V] of each sequence
    change    how much they change with noise of the size of the roundings of all layers; None: not
              computed yet
    why_not   why there is none
    """

    sequences: list[list[int]]
    logits: list[Tensor]
    change: float | None = None
    why_not: str = ""


class _VerdictData(TypedDict):
    """Verdict as the cache stores it."""

    errors: list[tuple[str, float]]
    limit: float


@dataclass(eq=False)
class SelfCheck:
    """The self-check of one model.

    apart  the logits of the model are those of this rank only. All logits are compared: all ranks
           have the same verdict
    """

    model: StockModel
    options: Options
    apart: LogitsOfRank | None = None
    _reference: OwnForward | None = None

    def record(self, key: str | None, specs: Sequence[StateSpec], report: Report) -> None:
        """Compute all that `run` will need of the class's own forward, which cannot run after
        weights are freed; nothing if the cache has the verdict.

        key, specs, report  of the program
        """
        entry = self._entry(key)
        if entry is not None and _read(entry) is not None:
            return
        reference = self._own_forward(report)
        if not reference.why_not:
            noise = _noise(specs, self.model.hf_model.device)
            reference = replace(reference, change=self._own_change(report, reference, noise))
        self._reference = reference

    def run(self, program: Program, columns: int = 1) -> None:
        """Compare the program with the class's own forward, and add a note to its report.

        columns   of the block tables of later steps: with the same number here, kernels are
                  compiled once for both

        A successful check is stored in the cache of compiled graphs. Binds the program to other
        caches. Raises ValueError if the logits differ by more than rounding.
        """
        hf_model = self.model.hf_model
        name = type(hf_model).__name__
        start = time.perf_counter()
        entry = self._entry(program.key)
        stored = _read(entry) if entry is not None else None
        verdict = stored or self.verdict(program, columns)
        if verdict.why_not:
            program.report.notes.append(f"no self-check: {verdict.why_not}")
            return
        if not verdict.right:
            raise ValueError(
                f"{name} computes something else in the runtime than by itself: its logits differ "
                f"by {verdict.numbers()} of "
                "their spread, and rounding explains "
                f"{verdict.limit:.1e}{_reason(hf_model)}; use another class, or "
                "--no-self-check (self_check=False) to run it nevertheless"
            )
        if entry is not None and stored is None:
            with suppress(OSError):
                entry.write({"errors": list(verdict.errors), "limit": verdict.limit})
        when = "at an earlier start" if stored else f"in {time.perf_counter() - start:.2f} s"
        program.report.notes.append(
            f"self-check {when}: as {name}'s own forward; logits differ by {verdict.numbers()} of "
            f"their spread, up to {verdict.limit:.1e} is rounding"
        )

    def verdict(self, program: Program, columns: int = 1) -> Verdict:
        """Run both computations, unless the class's own was recorded, and compare their logits."""
        reference, self._reference = self._reference or self._own_forward(program.report), None
        if reference.why_not:
            return Verdict(why_not=reference.why_not)
        errors: dict[str, list[float]] = {}
        for kind, number, first, logits in _ragged(program, reference.sequences, columns):
            for row, out in enumerate(self._whole(logits)):
                errors.setdefault(kind, []).append(
                    difference(out, reference.logits[number][first + row])
                )
        largest_errors = tuple((kind, agreed(relative)) for kind, relative in errors.items())
        noise = _noise(program.specs, program.device)
        in_8_bits = program.dtype not in ROUNDING or _multiplies_codes_by_head(program.report)
        limit = max(ROOM * noise, IN_8_BITS) if in_8_bits else ROOM * noise
        verdict = Verdict(largest_errors, limit)
        if verdict.right:
            return verdict
        change = reference.change
        if change is None:
            change = self._own_change(program.report, reference, noise)
        if ABOVE_OWN * change > MOST:
            return Verdict(
                why_not=f"a rounding changes the logits of the class's own forward by {change:.1e}"
            )
        return Verdict(largest_errors, max(limit, ABOVE_OWN * change))

    def _entry(self, key: str | None) -> Entry[_VerdictData] | None:
        """The cache entry of the verdict, by program and by the class's sources, configuration and
        version. None if the program was not cached."""
        if key is None:
            return None
        import transformers

        kind = type(self.model.hf_model)
        return Entry(
            {
                "kind of program": "self-check",
                "program": key,
                "class": f"{kind.__module__}.{kind.__qualname__}, "
                f"{file_digest(Path(inspect.getfile(kind)))}",
                "configuration": digest(self.model.config.to_json_string(use_diff=False)),
                "version of transformers": transformers.__version__,
                **sources_in(*MODEL_CODE, "runtime/execution/self_check.py"),
            },
            self.options,
        )

    def _own_forward(self, report: Report) -> OwnForward:
        """Run the class's own forward. report: of the program that it is compared with."""
        hf_model = self.model.hf_model
        config = hf_model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and longest < max(LENGTHS):
            why = f"it needs sequences of {max(LENGTHS)} tokens, the model has {longest} positions"
            return OwnForward([], [], why_not=why)
        sequences = [
            plain_tokens(hf_model.config, config.vocab_size, length, seed)
            for seed, length in enumerate(LENGTHS)
        ]
        try:
            logits = self._own_logits(report, sequences)
        except Exception as error:  # code of others, such as layers that only run compiled
            why = f"the class's own forward fails: {type(error).__name__}: {first_line(error)}"
            return OwnForward([], [], why_not=why)
        if not all(rows.isfinite().any(-1).all() for rows in logits):
            return OwnForward([], [], why_not="the class's own forward gives no finite logits")
        return OwnForward(sequences, logits)

    def _own_change(self, report: Report, reference: OwnForward, noise: float) -> float:
        """How much the logits of the class's own forward change with this noise in its
        embeddings.
        """

        def disturb(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            signs = (
                torch.randint(2, out.shape, generator=torch.Generator().manual_seed(0)).to(
                    out.device
                )
                * 2
                - 1
            )
            return (out.double() * (1 + noise * signs)).to(out.dtype)

        hook = self.model.hf_model.get_input_embeddings().register_forward_hook(disturb)
        try:
            disturbed_logits = self._own_logits(report, reference.sequences)
        finally:
            hook.remove()
        return agreed(
            [
                difference(row, other)
                for out, expected in zip(disturbed_logits, reference.logits, strict=True)
                for row, other in zip(out, expected, strict=True)
            ]
        )

    def _own_logits(self, report: Report, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [T, V] of each sequence, by the class's own forward."""
        hf_model = self.model.hf_model
        with torch.no_grad(), own_attention(hf_model), _rows_of_latents(self.model, report):
            reference = [
                hf_model(input_ids=torch.tensor([tokens], device=hf_model.device), use_cache=False)
                for tokens in sequences
            ]
            return [self._whole(out.logits[0].float()) for out in reference]

    def _whole(self, logits: Tensor) -> Tensor:
        """The logits of all ids [T, V]."""
        return logits if self.apart is None else self.apart.gathered(logits)


def _read(entry: Entry[_VerdictData]) -> Verdict | None:
    try:
        fields = entry.read()
    except (OSError, DamagedEntry):
        return None
    return None if fields is None else Verdict(tuple(fields["errors"]), fields["limit"])


def _reason(hf_model: Any) -> str:
    takes = inspect.signature(hf_model.forward).parameters
    missing = [name for name in ("position_ids", "logits_to_keep") if name not in takes]
    return f" (its forward takes no {' and no '.join(missing)})" if missing else ""


def _multiplies_codes_by_head(report: Report) -> bool:
    """Whether products by head have quantized operands, which those of a class do not have."""
    ops = [REGISTRY[choice.op] for choice in report.kernels]
    return any(Kind.BMM in op.kind and "weight_scale" in op.signature.parameters for op in ops)


def _noise(specs: Sequence[StateSpec], device: torch.device) -> float:
    """Relative error that the roundings of all layers accumulate."""
    return rounding_noise(state_dtype(specs), device, len(specs))


def _ragged(
    program: Program, sequences: Sequence[Sequence[int]], wide: int
) -> Iterator[tuple[str, int, int, Tensor]]:
    """(kind of rows, number of the sequence, its first position, logits) of each chunk of STEPS."""
    block_size = block_size_of(program.specs) or PAGE
    columns = -(-max(LENGTHS) // block_size)
    runner = Runner(
        Programs({"text": program}),
        num_blocks=len(sequences) * columns,
        block_size=block_size,
        max_num_seqs=len(sequences),
        max_num_rows=sum(LENGTHS),
        max_columns=max(columns, wide),
    )
    done = [0] * len(sequences)
    for number, step in enumerate(STEPS):
        chunks = []
        wanted = [
            max(count - 1, 1) for _, count in step
        ]  # not all rows: a class may return more logits than requested
        for i, (_, count) in enumerate(step):
            new = (0, tuple(range(i * columns, (i + 1) * columns))) if number == 0 else (0, ())
            chunks.append(
                Chunk(
                    str(i),
                    i,
                    tuple(sequences[i][done[i] : done[i] + count]),
                    done[i],
                    (new,) * len(groups_of(program.specs)),
                    num_output_rows=wanted[i],
                )
            )
        out = runner.logits(ScheduledStep(tuple(chunks))).float()
        logits = torch.split(out[: sum(wanted)], wanted)
        for i, (kind, count) in enumerate(step):
            done[i] += count
            yield kind, i, done[i] - wanted[i], logits[i]


@contextmanager
def _rows_of_latents(model: StockModel, report: Report) -> Iterator[None]:
    """Do not quantize what a quantized kv_b_proj multiplies where the program does not."""
    layers = dict(model.named_modules())
    paths = {each.module_path for each in report.kernels if Kind.WEIGHT in REGISTRY[each.op].kind}
    layers_of_latents = [
        layer
        for path in paths
        if isinstance(layer := layers.get(f"{path}.kv_b_proj"), QuantizedLinear)
    ]

    def plain(layer: QuantizedLinear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, layer.dequantized().to(x.dtype))

    for layer in layers_of_latents:
        layer.__dict__["forward"] = partial(plain, layer)
    try:
        yield
    finally:
        for layer in layers_of_latents:
            del layer.__dict__["forward"]


@contextmanager
def own_attention(hf_model: Any) -> Iterator[None]:
    """Use the class's own attention instead of ours."""
    ours = attention_of(hf_model.config)
    hf_model.set_attn_implementation("eager")
    try:
        yield
    finally:
        hf_model.set_attn_implementation(ours)
