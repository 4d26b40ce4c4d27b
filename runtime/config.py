"""EngineConfig: how one engine is set up. Flags of the command line are made from its fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # flags are made from this file, and --help is not to wait for torch
    from atomc.options import Options

POLICIES = ("fcfs", "priority")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineConfig:
    """One model on one device. Each field's metadata has a line of help. Raises ValueError for values out of range."""

    model: str | None = _option(
        None, "a checkpoint directory, or a name on the Hugging Face hub; left out: the small model that comes with atomc"
    )
    dtype: str | None = _option(None, "of the weights, such as bfloat16; left out: what the checkpoint says")
    device: str | None = _option(None, "cpu or cuda; left out: a GPU if there is one")
    load_format: str = _option("auto", "auto or safetensors read the weights, dummy makes small random ones")
    quantization: str | None = _option(
        None, "quantize the weights when they are read: fp8, fp8_per_token, fp8_block, int8, int4, mxfp4 or mxfp4_a16"
    )
    quantization_ignore: tuple[str, ...] = _option((), "layers to keep as they are, by name, part of a name or re:pattern")
    max_model_len: int | None = _option(None, "tokens of the longest sequence; left out: as model and memory allow")
    max_num_seqs: int | None = _option(None, "sequences that run at once, at most; left out: 256 on a GPU, 64 on a CPU")
    max_num_batched_tokens: int | None = _option(
        None, "tokens of one step, at most; longer prompts are computed in chunks; left out: 2048 on a GPU, 256 on a CPU, "
        "but at least max_num_seqs"
    )
    gpu_memory_utilization: float = _option(0.9, "share of the GPU's memory for weights, activations and cache together")
    kv_bytes: int | None = _option(None, "size of the cache in bytes, instead of a share of the memory")
    num_blocks: int | None = _option(None, "size of the cache in blocks, instead of a share of the memory")
    threads: int | None = _option(
        None, "threads that compute on a CPU; left out: as OMP_NUM_THREADS says, else one for each physical core that the "
        "process may use, of which a server leaves one to its front process if there are more than two; 1 suits a machine "
        "that others use too"
    )
    enforce_eager: bool = _option(False, "no CUDA graphs")
    enable_prefix_caching: bool | None = _option(
        None, "requests share the cache of a common beginning (default: yes, unless --options layout=contiguous: there "
        "they cannot)"
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option("fcfs", "in order of arrival, or the lowest priority first")
    max_queue: int = _option(1024, "requests that wait, at most; further ones are refused")
    grammar_seconds: float = _option(5.0, "processor time to compile one form of structured output, at most")
    grammar_cache_bytes: int = _option(2**29, "memory of compiled forms of structured output that are kept, at most")
    self_check: bool = _option(
        True, "compare a few steps of a class of transformers with its own forward, and refuse it if they differ"
    )
    speculative_tokens: int = _option(0, "tokens drafted a step from earlier text, at most; 0: none")
    ngram_min: int = _option(2, "the shortest run of tokens that is looked up for a draft")
    ngram_max: int = _option(4, "the longest run of tokens that is looked up for a draft")
    seed: int | None = _option(None, "makes drawing repeatable for requests that bring no seed")
    options: "Options | Mapping[str, Any]" = field(default_factory=dict, metadata={"help": (
        "an option of the compiler, such as glue=eager or batch_invariant=true; may be given several times"
    )})  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "kv_bytes", "max_queue",
                     "grammar_cache_bytes", "ngram_min", "threads"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if self.grammar_seconds <= 0:
            raise ValueError(f"grammar_seconds is {self.grammar_seconds}, it must be positive")
        if self.quantization_ignore and self.quantization is None:
            raise ValueError("quantization_ignore names layers to keep, but nothing is quantized: give quantization, too")
        if self.num_blocks is not None and self.kv_bytes is not None:
            raise ValueError("num_blocks and kv_bytes both size the cache: give one of them")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, it must be above 0 and at most 1")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy is {self.scheduling_policy!r}, expected one of {list(POLICIES)}")
        if self.speculative_tokens < 0:
            raise ValueError(f"speculative_tokens is {self.speculative_tokens}, it must be 0 (none) or positive")
        if self.ngram_max < self.ngram_min:
            raise ValueError(f"ngram_max is {self.ngram_max}, below ngram_min, {self.ngram_min}")
