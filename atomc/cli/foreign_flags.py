"""Flags of other servers, with the equivalent in atomc: shown as a hint when one is given.
docs/from-vllm.md has the same table.
"""

_LEAVE_OUT = "not needed, leave it out"

# By command. None of these is a flag of atomc.
FOREIGN_FLAGS = {
    "atomc serve": {
        "--allowed-origins": "use --allow-origin",
        "--api-server-count": "one process serves HTTP: leave it out",
        "--async-scheduling": _LEAVE_OUT,
        "--attention-backend": "use --options providers, such as --options "
        '\'providers=["triton", "torch"]\'',
        "--block-size": "a block has 16 tokens with --options layout=paged, a whole sequence "
        "with layout=contiguous",
        "--chunked-prefill-size": "use --max-num-batched-tokens",
        "--compilation-config": "use --options, such as --options glue=eager",
        "--context-length": "use --max-model-len",
        "--cuda-graph-sizes": "sizes follow from --max-num-seqs: leave it out",
        "--cpu-offload-gb": "offloading is not supported; --quantization reduces the size of "
        "the weights",
        "--data-parallel-backend": "use --ray for a Ray cluster, else leave it out",
        "--data-parallel-size": "use --dp",
        "--enable-eplb": "experts do not move: use --expert-load, `atomc place-experts`, "
        "--expert-placement",
        "--enable-expert-parallel": "use --ep",
        "--disable-cuda-graph": "use --enforce-eager",
        "--disable-log-requests": "use --no-log-requests",
        "--disable-log-stats": _LEAVE_OUT,
        "--disable-custom-all-reduce": _LEAVE_OUT,
        "--disable-radix-cache": "use --no-enable-prefix-caching",
        "--distributed-executor-backend": "use --ray for a Ray cluster, torchrun for hosts without "
        "one, and neither on one host",
        "--download-dir": "set the environment variable HF_HOME",
        "--enable-auto-tool-choice": _LEAVE_OUT,
        "--enable-chunked-prefill": "chunked prefill is always on, with "
        "--max-num-batched-tokens per step",
        "--enable-log-requests": "requests are logged: leave it out",
        "--enable-lora": "not needed: adapters are given with --lora NAME=FOLDER",
        "--enable-prompt-tokens-details": "usage always has them: leave it out",
        "--enable-sleep-mode": "the server can always sleep: leave it out",
        "--guided-decoding-backend": _LEAVE_OUT,
        "--hf-overrides": "change config.json in a copy of the directory",
        "--init-expert-location": "use --expert-placement",
        "--kv-cache-dtype": "use --options kv_cache_dtype=fp8",
        "--kv-cache-memory-bytes": "use --kv-bytes",
        "--limit-mm-per-prompt": "use --limit-images",
        "--lora-modules": "use --lora NAME=FOLDER, once for each adapter",
        "--lora-paths": "use --lora NAME=FOLDER, once for each adapter",
        "--max-cpu-loras": "all adapters are on the device: use --max-loras",
        "--max-loras-per-batch": "use --max-loras",
        "--mem-fraction-static": "use --gpu-memory-utilization",
        "--model": "the model is a positional argument: atomc serve MODEL",
        "--model-path": "the model is a positional argument: atomc serve MODEL",
        "--max-mamba-cache-size": "use --max-num-seqs and --state-snapshots",
        "--max-running-requests": "use --max-num-seqs",
        "--nnodes": "use --ray, or start `atomc serve` by torchrun on each host",
        "--num-gpu-blocks-override": "use --num-blocks",
        "--override-generation-config": "change generation_config.json in a copy of the "
        "directory, or use --generation-config none",
        "--pipeline-parallel-size": "use --pp",
        "--random-seed": "use --seed",
        "--revision": "download that revision and pass its directory",
        "--rope-scaling": "change config.json in a copy of the directory",
        "--runner": "the server offers both generation and embeddings: leave it out",
        "--schedule-policy": "use --scheduling-policy",
        "--speculative-config": "use --speculative ngram or mtp, optionally with "
        "--speculative-tokens N",
        "--structured-outputs-config": _LEAVE_OUT,
        "--swap-space": "preempted requests are recomputed, not swapped: leave it out",
        "--task": "the server offers both generation and embeddings: leave it out",
        "--tensor-parallel-size": "use --tp",
        "--tokenizer": "the checkpoint's tokenizer is always used",
        "--trust-remote-code": "code in a checkpoint is never run: leave it out",
        "-dp": "use --dp",
        "-pp": "use --pp",
        "-tp": "use --tp",
    },
}
