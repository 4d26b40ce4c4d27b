"""EngineConfig: the settings of an engine. Command line flags are generated from its fields, and
--help imports this file: it does not import torch, which is slow.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fsdecode
from typing import Any, Literal

from atomc.options import Options
from atomc.runtime.config_fields import FlagGroup, check_values

DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)
# The dtypes of weights: names of vLLM, torch and transformers, and torch's name for each.
DTYPES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float64": "float64",
    "fp64": "float64",
    "double": "float64",
}
# The names in atomc.quantization.ONLINE, which is too slow to import for parsing arguments.
SCHEMES = ("fp8", "fp8_per_token", "fp8_block", "int8", "int4", "mxfp4", "mxfp4_a16", "nvfp4_a16")
# Draft tokens per step, by where they come from.
SPECULATIVE_TOKENS = {"ngram": 3, "mtp": 1}

POSITIVE = ("step_timeout", "max_itl_ms", "grammar_seconds")

MODEL, MEMORY = FlagGroup("model"), FlagGroup("memory and batching")
LORA, DEVICES = FlagGroup("LoRA"), FlagGroup("several devices")
GENERATION = FlagGroup("generation")


@dataclass(frozen=True)
class EngineConfig:
    """Settings for one model on its devices. Field metadata has the help text, and the possible
    values of some. Raises ValueError for other values, and OptionsError for wrong options.
    """

    model: str | None = MODEL.option(
        None,
        "a checkpoint directory or a name on the Hugging Face hub; default: the demo model of "
        "atomc",
    )
    dtype: str | None = MODEL.option(
        None,
        "dtype of the weights, such as bfloat16 (also bf16), float16 (fp16, half) or float32; "
        "default, and auto: the checkpoint's",
        DTYPES,
    )
    device: str | None = MODEL.option(None, "cpu or cuda; default: a GPU if there is one")
    load_format: Literal["auto", "safetensors", "dummy"] = MODEL.option(
        "auto", "auto, safetensors, or dummy for small random weights"
    )
    mmap: bool = MODEL.option(
        True,
        "map the files of the weights into memory; --no-mmap reads them, which can be faster from "
        "a network disk and takes memory for one file more",
    )
    quantization: str | None = MODEL.option(
        None,
        "quantize the weights when they are read: fp8, fp8_per_token, fp8_block, int8, int4, "
        "mxfp4, mxfp4_a16 or nvfp4_a16",
        SCHEMES,
    )
    quantization_ignore: tuple[str, ...] = MODEL.option(
        (), "layers not to quantize, by name, part of a name or re:pattern"
    )
    max_model_len: int | None = MEMORY.option(
        None, "maximum sequence length in tokens; default: as model and memory allow", least=1
    )
    max_num_seqs: int | None = MEMORY.option(
        None, "maximum number of running sequences; default: 256 on a GPU, 64 on a CPU", least=1
    )
    max_num_batched_tokens: int | None = MEMORY.option(
        None,
        "maximum number of tokens per step; longer prompts are computed in chunks; default: 2048 "
        "on a GPU, 256 on a CPU, but at least max_num_seqs",
        least=1,
    )
    max_itl_ms: float | None = MEMORY.option(
        None,
        "aim at this maximum time in milliseconds between two tokens of a running stream: steps "
        "with streams compute fewer tokens of prompts, as many as the times of earlier steps "
        "allow, at least 16; default: no limit, because it lowers throughput and lets prompts "
        "wait longer",
    )
    gpu_memory_utilization: float = MEMORY.option(
        0.9, "share of the GPU memory for weights, activations and KV cache"
    )
    kv_bytes: int | None = MEMORY.option(
        None, "size of the KV cache in bytes, instead of a share of the memory", least=1
    )
    num_blocks: int | None = MEMORY.option(
        None, "size of the KV cache in blocks, instead of a share of the memory", least=1
    )
    tp: int = DEVICES.option(
        1,
        "number of processes (ranks) among which the weights are split: tensor parallelism, over "
        "as many GPUs",
        least=1,
    )
    pp: int = DEVICES.option(
        1,
        "number of stages into which the layers are divided: pipeline parallelism, over as many "
        "GPUs; with --tp, each stage has this many ranks",
        least=1,
    )
    ep: bool = DEVICES.option(
        False,
        "each rank of --tp holds some of the experts, instead of a part of every expert; with "
        "--dp, each of all its ranks does, and tokens travel to the ranks of their experts",
    )
    expert_placement: str | None = DEVICES.option(
        None,
        "with --ep: a JSON file that says which rank has which expert, as `atomc place-experts` "
        "writes it; default: equal ranges of experts, by rank",
    )
    dp: int = DEVICES.option(
        1,
        "number of engines that serve the model, each with its own KV cache and the GPUs or CPU "
        "cores of --tp: data parallelism; requests go to the engine with the fewest. With --ep: "
        "number of parts of one engine, each with its own requests and KV cache",
        least=1,
    )
    step_timeout: float | None = DEVICES.option(
        None,
        "with several ranks: maximum duration of a step in seconds, after which its ranks are "
        "ended; default: 8 on a GPU, 120 on a CPU",
    )
    threads: int | None = MEMORY.option(
        None,
        "CPU threads; default: OMP_NUM_THREADS, else one per physical core available to the "
        "process, of which a server leaves one to its frontend process if there are more than two; "
        "use 1 on a shared machine",
        least=1,
    )
    enforce_eager: bool = MEMORY.option(False, "no CUDA graphs")
    enable_prefix_caching: bool | None = MEMORY.option(
        None,
        "share the KV cache of common prefixes (default: yes, except with --options "
        "layout=contiguous, which does not support it)",
    )
    state_snapshots: int | None = MEMORY.option(
        None,
        "number of states to keep at the ends of prefixes, for models with a state per sequence "
        "(linear attention, state space models), whose prefix cache and preemption need them; 0: "
        "no prefix cache; default: up to --max-num-seqs in an eighth of the memory that is left "
        "for the cache",
    )
    scheduling_policy: Literal["fcfs", "priority"] = MEMORY.option(
        "fcfs", "fcfs: order of arrival; priority: lowest value first"
    )
    max_queue: int = MEMORY.option(
        1024, "maximum number of waiting requests; further ones are rejected", least=1
    )
    grammar_seconds: float = GENERATION.option(
        5.0, "maximum CPU time for compiling one grammar of structured output, in seconds"
    )
    grammar_cache_bytes: int = GENERATION.option(
        2**29, "size of the cache of compiled grammars in bytes", least=1
    )
    image_cache_bytes: int = MEMORY.option(
        2**30, "size of the cache of image embeddings on the device in bytes", least=1
    )
    image_queue_bytes: int = MEMORY.option(
        2**33,
        "maximum size of the pixels of all requests in bytes; further requests with images are "
        "rejected",
        least=1,
    )
    max_image_patches: int = MEMORY.option(
        16384,
        "maximum number of image patches that a step encodes; images with more are rejected",
        least=1,
    )
    lora: Mapping[str, str] = LORA.table(
        "a LoRA adapter by name, the folder that peft saved; requests choose it by the name; may "
        "be given several times"
    )
    max_loras: int | None = LORA.option(
        None,
        "maximum number of LoRA adapters loaded at once; default: as many as --lora names, at "
        "least 8 with --allowed-lora-path",
        least=1,
    )
    max_lora_rank: int | None = LORA.option(
        None,
        "maximum rank of a LoRA adapter; default: that of those of --lora, at least 16",
        least=1,
    )
    lora_target_modules: tuple[str, ...] = LORA.option(
        (),
        "last name of modules that LoRA adapters may change, such as q_proj; may be given several "
        "times; default: those of the adapters of --lora; without --lora or with max_loras, all "
        "linear layers of the model's layers",
    )
    self_check: bool = MODEL.option(
        True,
        "compare a few steps of a transformers model with its own forward, and reject it if "
        "they differ",
    )
    speculative: Literal["ngram", "mtp"] | None = GENERATION.option(
        None,
        "where draft tokens come from; ngram: from earlier text; mtp: from the checkpoint's own "
        "draft layers (multi-token prediction); default: ngram if --speculative-tokens is given, "
        "else none",
    )
    speculative_tokens: int = GENERATION.option(
        0,
        "maximum number of draft tokens per step; 0: none, or with --speculative 3 (ngram) or 1 "
        "(mtp)",
    )
    ngram_min: int = GENERATION.option(
        2, "minimum length of the n-gram to look up for a draft", least=1
    )
    ngram_max: int = GENERATION.option(4, "maximum length of the n-gram to look up for a draft")
    expert_load: bool = GENERATION.option(
        False,
        "count how many tokens each expert of a mixture gets (GET /experts, /metrics)",
    )
    seed: int | None = GENERATION.option(
        None, "makes sampling reproducible for requests without a seed"
    )
    options: Options | Mapping[str, Any] = MODEL.table(  # noqa: RUF009
        "an option of the compiler, such as glue=eager or batch_invariant=true; may be given "
        "several times"
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        Options.of(self.options)  # raises OptionsError for an unknown or wrong one
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise ValueError(f"device is {self.device!r}, expected cpu, cuda or one GPU as cuda:0")
        self._check_numbers()
        self._check_stages()
        self._check_experts()
        self._check_cache()
        if self.quantization_ignore and self.quantization is None:
            raise ValueError("quantization_ignore needs quantization: set both")
        self._check_speculation()
        self._check_lora()

    @property
    def data_ranks(self) -> int:
        """Parts of an engine, of tp ranks each, with requests of their own and shared experts."""
        return self.dp if self.ep and self.pp == 1 else 1

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the experts of a layer are divided by expert; 1 without ep."""
        return self.tp * self.data_ranks if self.ep else 1

    @property
    def num_engines(self) -> int:
        return self.dp // self.data_ranks

    @property
    def num_ranks(self) -> int:
        """Processes of one engine: tp of them in each of pp stages, or for each data rank."""
        return self.tp * self.pp * self.data_ranks

    @property
    def several_ranks(self) -> str:
        """What asks for several ranks, for messages."""
        if self.data_ranks > 1:
            return f"dp is {self.dp} with ep" + (f" and tp is {self.tp}" if self.tp > 1 else "")
        return f"tp is {self.tp}" + (f" and pp is {self.pp}" if self.pp > 1 else "")

    @property
    def num_processes(self) -> int:
        """Number of processes that share the cores and the memory of the host."""
        return self.num_ranks * self.num_engines

    @property
    def reporting_ranks(self) -> range:
        """Those whose results are the results of steps: the first rank of the last stage, or of
        each data rank.
        """
        return range((self.pp - 1) * self.tp, self.num_ranks, self.tp)

    def _check_numbers(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, it must be positive")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, it must be above 0 "
                "and at most 1"
            )
        if self.ngram_max < self.ngram_min:
            raise ValueError(
                f"ngram_max is {self.ngram_max}, expected at least ngram_min={self.ngram_min}"
            )

    def _check_cache(self) -> None:
        if self.num_blocks is not None and self.kv_bytes is not None:
            raise ValueError(
                "num_blocks and kv_bytes both set the size of the cache: set one of them"
            )
        if self.state_snapshots is not None and self.state_snapshots < 0:
            raise ValueError(
                f"state_snapshots is {self.state_snapshots}, it must be 0 (none) or positive"
            )
        if self.state_snapshots and self.enable_prefix_caching is False:
            raise ValueError(
                f"state_snapshots is {self.state_snapshots}, but enable_prefix_caching is off, "
                "which snapshots are for: leave one of them out"
            )

    def _check_stages(self) -> None:
        if self.pp > 1 and self.expert_load:
            raise ValueError(
                "pp is not supported with expert_load, which counts the experts of one process"
            )

    def _check_experts(self) -> None:
        """Also makes a string of expert_placement, which may be a path."""
        if self.expert_placement is not None:
            if not self.ep:
                raise ValueError(
                    "expert_placement says which rank has which expert, but experts are not "
                    "divided over ranks: set ep, with tp or dp"
                )
            # Ranks and engines in other processes compare and receive strings.
            object.__setattr__(self, "expert_placement", fsdecode(self.expert_placement))
        if not self.ep:
            return
        if self.tp == self.dp == 1:
            raise ValueError(
                "ep divides the experts among ranks: set tp to their number, or dp for ranks that "
                "each have their own requests"
            )
        if self.pp > 1 and self.tp == 1:
            raise ValueError(
                "pp is not supported with dp and ep, whose ranks send each other tokens: leave out "
                "one of them, or use tp with ep"
            )

    @property
    def lora_enabled(self) -> bool:
        """Whether requests may have LoRA adapters."""
        return bool(self.lora) or self.max_loras is not None

    def _check_lora(self) -> None:
        """Also makes strings of folders that are paths."""
        if not self.lora_enabled:
            for name in ("max_lora_rank", "lora_target_modules"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for LoRA adapters, and there are none: set lora or max_loras"
                    )
            return
        for name, folder in self.lora.items():
            if not name or not isinstance(folder, str | PathLike):
                raise ValueError(f"lora has {name!r}: {folder!r}, expected a name and a folder")
        # Ranks and engines in other processes compare and receive strings.
        folders = {name: fsdecode(folder) for name, folder in self.lora.items()}
        object.__setattr__(self, "lora", folders)
        if self.max_loras is not None and self.max_loras < len(self.lora):
            raise ValueError(
                f"max_loras is {self.max_loras}, but lora names {len(self.lora)} adapters: raise it"
            )
        self._check_no_lora_conflict()

    def _check_no_lora_conflict(self) -> None:
        wrong = {
            "tp": self.tp > 1 and "adapters are not split over ranks",
            "pp": self.pp > 1 and "adapters are not divided into stages",
            "dp with ep": self.data_ranks > 1 and "requests of its ranks have no adapters",
            "speculative 'mtp'": self.speculative == "mtp" and "the draft layer has no adapters",
        }
        for what, why in wrong.items():
            if why:
                raise ValueError(
                    f"{what} is not supported with LoRA adapters (lora, max_loras): {why}"
                )

    def _check_speculation(self) -> None:
        """Also sets the default of `speculative` by `speculative_tokens`, and the reverse."""
        if self.speculative_tokens < 0:
            raise ValueError(
                f"speculative_tokens is {self.speculative_tokens}, it must be 0 (none) or positive"
            )
        if self.speculative is None and self.speculative_tokens:
            object.__setattr__(self, "speculative", "ngram")
        if self.speculative is not None and not self.speculative_tokens:
            object.__setattr__(self, "speculative_tokens", SPECULATIVE_TOKENS[self.speculative])
