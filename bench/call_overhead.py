"""What a call of a compiled stock model costs on a GPU: eager, Inductor and atom, on the host and in
all.

    python bench/call_overhead.py --jobs 6 --results bench/results/call-overhead-h200.json
    python bench/call_overhead.py --only qwen3 bert --modes default --layers 12
    python bench/call_overhead.py --results FILE --table     # prints what FILE has
    python bench/call_overhead.py --first-calls --only olmo2 --modes default

Widths are real, --layers are few, weights random. A row is a process in which the three ways share
the weights: first calls one after the other, then --rounds of some calls of each in turn, while no
other row measures. Rows that FILE has are not measured again. Columns, in ms, are medians:
    host   until the call returns
    all    until the GPU has done it
    first  s until the first result, with a cold cache of Inductor and none of atom. What the second
           way finds loaded it does not pay: --first-calls measures only these, each way in a process
           of its own, alone on the machine, with empty caches of Inductor, of Triton and of atom
    share  the median over the rounds of atom's time by Inductor's of the same round
    error  the largest difference of atom from eager, as a share of the largest value; Inductor's.
           Of decode rows, of tokens: 0, unless a rounding chose another one
"decode 16" is a token of `generate` with a static cache, batch 16, "prompt 512" a forward without a
cache. Encoders of images and sound take their own number of tokens.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import atomc

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8},
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4},
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "gpt2": {"n_embd": 768, "n_head": 12},
    "olmo2": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16},
    "qwen3_moe": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64},
    "mixtral": {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16},
    "gpt_oss": {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32},
    "deepseek_v2": {"hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 32},
    "qwen3_next": {"hidden_size": 2048, "moe_intermediate_size": 512, "num_experts": 32},
    "falcon_h1": {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8},
}
# Sizes that configs name alike and whose defaults are too large, or differ from the heads above.
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 8, "head_dim": 128},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3_moe": {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "deepseek_v2": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "num_experts_per_tok": 6,
    },
    "falcon_h1": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
}
ENCODERS = ("bert", "modernbert", "xlm-roberta", "vit", "siglip_vision_model", "whisper")
WORKLOADS = {"decoder": ("decode 1", "decode 16", "prompt 512"), "encoder": ("1 x 128", "32 x 256")}
MODES = ("default", "reduce-overhead")
WAYS = ("eager", "inductor", "atom")
VOCABULARY = 32000


def decoder(name: str, layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**DECODERS[name], **EXTRA.get(name, {})}
    sizes |= {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    config = AutoConfig.for_model(name, vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def encoder(name: str, layers: int) -> Any:
    from transformers import AutoConfig, AutoModel

    sizes = {"encoder_layers": layers} if name == "whisper" else {"num_hidden_layers": layers}
    model = AutoModel.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float16)
    return model.encoder if name == "whisper" else model


def forward_of(model: Any, name: str, batch: int, tokens: int) -> Callable[..., Tensor]:
    """A function that calls the model, in one of the ways, with the same inputs."""
    ids = torch.randint(5, 20000, (batch, tokens), device="cuda")
    if name in DECODERS:
        return lambda way: way(ids, use_cache=False, logits_to_keep=1).logits
    if name in ("vit", "siglip_vision_model"):
        size = model.config.image_size
        pixels = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.float16)
        return lambda way: way(pixels).last_hidden_state
    if name == "whisper":
        sound = torch.randn(batch, 80, 3000, device="cuda", dtype=torch.float16)
        return lambda way: way(sound).last_hidden_state
    mask = torch.ones_like(ids)
    return lambda way: way(input_ids=ids, attention_mask=mask).last_hidden_state


def generate(
    model: Any, ids: Tensor, way: str, mode: str, tokens: int
) -> tuple[Tensor, list[float]]:
    """The tokens that `generate` adds to ids, greedily, with a static cache, and when it had each,
    in seconds.
    """
    from transformers import CompileConfig, StoppingCriteria

    class Times(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []
            self.no = torch.zeros(len(ids), dtype=torch.bool, device="cuda")

        def __call__(self, *arguments: object, **options: object) -> Tensor:
            self.times.append(time.perf_counter())
            return self.no

    how: dict[str, Any] = {"disable_compile": True}
    if way != "eager":
        how = {"compile_config": CompileConfig(backend=way, mode=mode, fullgraph=False)}
    times = Times()
    out = model.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        eos_token_id=None,
        stopping_criteria=[times],
        **how,
    )
    torch.cuda.synchronize()
    return out[:, ids.shape[1] :], times.times


@contextmanager
def alone() -> Iterator[None]:
    """While no other row measures."""
    with open(Path(tempfile.gettempdir()) / "call_overhead.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(function: Callable[[], object], number: int) -> tuple[float, float]:
    """ms a call until the calls return, and until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        function()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return 1e3 * (host - start) / number, 1e3 * (time.perf_counter() - start) / number


def prepared(model: Any, name: str, workload: str, mode: str, way: str) -> tuple[Any, Any]:
    """A function that returns a result, and one that returns ms on the host and in all."""
    numbers = [int(word) for word in workload.split() if word.isdigit()]
    torch.manual_seed(1)
    if workload.startswith("decode"):
        ids = torch.randint(5, 20000, (numbers[0], 128), device="cuda")

        def token() -> tuple[float, float]:
            """Of a token; the first ones, with the prompt and a new cache, are left out."""
            times = run(40)[1][8:]
            ms = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
            return ms, ms  # generate waits for each token

        run = partial(generate, model, ids, way, mode)
        return lambda: run(16)[0], token
    batch, tokens = numbers if len(numbers) == 2 else (1, numbers[0])
    compiled = model if way == "eager" else torch.compile(model, backend=way, mode=mode)
    call = partial(forward_of(model, name, batch, tokens), compiled)
    return call, lambda: timed(call, 20)


def stock_model(name: str, layers: int) -> Any:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = (decoder if name in DECODERS else encoder)(name, layers)
    return model.eval().requires_grad_(False)


def first_call(name: str, workload: str, mode: str, layers: int, way: str) -> float:
    """s until the first result of a compiled model whose eager form has run."""
    model = stock_model(name, layers)
    with torch.inference_mode():
        prepared(model, name, workload, mode, "eager")[0]()
        call = prepared(model, name, workload, mode, way)[0]
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(name: str, workload: str, mode: str, layers: int, rounds: int) -> dict[str, Any]:
    """One row."""
    model = stock_model(name, layers)
    row: dict[str, Any] = {"first": {}, "host": {}, "all": {}, "error": {}}
    ways, results, times = {}, {}, {way: [] for way in WAYS}
    with torch.inference_mode():
        for way in WAYS:
            call, ways[way] = prepared(model, name, workload, mode, way)
            start = time.perf_counter()
            try:
                results[way] = call().float()
            except Exception as error:  # of a compiler: the row says which one failed
                sys.exit(f"{way}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
            torch.cuda.synchronize()
            row["first"][way] = time.perf_counter() - start
            difference = (results[way] - results["eager"]).abs().max()
            row["error"][way] = float(difference / results["eager"].abs().max())
            for _ in range(6):
                call()
            ways[way]()
        with alone():
            for _ in range(rounds):
                for way in WAYS:
                    times[way].append(ways[way]())
    for way in WAYS:
        row["host"][way], row["all"][way] = map(statistics.median, zip(*times[way], strict=True))
    row["notes"] = [note for report in atomc.reports() for note in report.notes]
    pairs = zip(times["atom"], times["inductor"], strict=True)
    row["share"] = statistics.median(a[1] / i[1] for a, i in pairs)
    return row


def run(row: tuple[str, str, str], arguments: argparse.Namespace, way: str = "") -> Any:
    """Measure a row, or the first call of one way, in a process of its own; what it says last if it
    fails.
    """
    command = [sys.executable, __file__, "--row", *row, *(["--way", way] if way else [])]
    command += ["--layers", str(arguments.layers), "--rounds", str(arguments.rounds)]
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "ATOMC_CACHE": "0"}
        if way:
            environment["TRITON_CACHE_DIR"] = f"{caches}/triton"
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"]
    return json.loads(lines[-1]) if done.returncode == 0 else lines[-1]


def line(row: str, values: dict[str, Any] | str) -> str:
    if isinstance(values, str):
        return f"{row:<45} {values[:80]}"
    columns = [values["host"], values["all"], values["first"]]
    numbers = "  ".join(" ".join(f"{column[way]:7.2f}" for way in WAYS) for column in columns)
    errors = " ".join(f"{values['error'][way]:.0e}" for way in ("atom", "inductor"))
    return f"{row:<45} {numbers}  {values['share']:5.2f}  {errors}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = (*DECODERS, *ENCODERS)
    parser.add_argument("--only", nargs="*", choices=models, default=models, metavar="MODEL")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=1, help="rows that compile at the same time")
    parser.add_argument("--results", type=Path, help="a JSON file, to which rows are added")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--first-calls", action="store_true", help="measure and print only these")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(first_call(*arguments.row, arguments.layers, arguments.way))
        return
    if arguments.row:
        print(json.dumps(measure(*arguments.row, arguments.layers, arguments.rounds)))
        return
    results: dict[str, Any] = {}
    if arguments.results and arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    rows = [
        (name, workload, mode)
        for name in arguments.only
        for workload in WORKLOADS["decoder" if name in DECODERS else "encoder"]
        for mode in arguments.modes
        if not arguments.table and not isinstance(results.get(f"{name}, {workload}, {mode}"), dict)
    ]
    if arguments.first_calls:
        print(f"{torch.__version__}, s until the first result: inductor, atom")
        for row in tqdm(rows, unit="row"):
            inductor, atom = (run(row, arguments, way) for way in WAYS[1:])
            print(f"{', '.join(row):<45} {inductor!s:.7}  {atom!s:.7}", flush=True)
        return
    with ThreadPoolExecutor(arguments.jobs) as pool, tqdm(total=len(rows), unit="row") as bar:
        for row, values in zip(rows, pool.map(lambda row: run(row, arguments), rows), strict=True):
            results[", ".join(row)] = values
            bar.update()
            if arguments.results:
                arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{torch.__version__}, ms; columns of three: {', '.join(WAYS)}")
    print(f"{'model, work, mode':<45} {'host':>23}  {'all':>23}  {'first, s':>23}  share  error")
    for row, values in results.items():
        print(line(row, values))


if __name__ == "__main__":
    main()
