"""Flags of other servers, and what does the same here: told to whoever gives one to our command."""

_ONE_DEVICE = "a model runs on one device here"
_LEAVE_OUT = "there is no need for it, leave it out"

# By command. None of these is a flag of ours.
ELSEWHERE = {
    "atomc serve": {
        "--allowed-origins": "use --allow-origin",
        "--block-size": "a block has 16 tokens, or a whole sequence: --options layout=paged or layout=contiguous",
        "--chunked-prefill-size": "use --max-num-batched-tokens",
        "--compilation-config": "use --options, such as --options glue=eager",
        "--context-length": "use --max-model-len",
        "--cpu-offload-gb": "weights stay on the device; --quantization makes them smaller",
        "--data-parallel-size": _ONE_DEVICE,
        "--disable-cuda-graph": "use --enforce-eager",
        "--disable-log-requests": "use --no-log-requests",
        "--disable-log-stats": _LEAVE_OUT,
        "--disable-radix-cache": "use --no-enable-prefix-caching",
        "--download-dir": "set the variable HF_HOME",
        "--enable-auto-tool-choice": _LEAVE_OUT,
        "--enable-chunked-prefill": "prompts are always computed in chunks, of --max-num-batched-tokens",
        "--enable-lora": "LoRA is not supported",
        "--guided-decoding-backend": _LEAVE_OUT,
        "--kv-cache-dtype": "use --options kv_cache_dtype=fp8",
        "--kv-cache-memory-bytes": "use --kv-bytes",
        "--mem-fraction-static": "use --gpu-memory-utilization",
        "--model": "give the model without a flag: atomc serve MODEL",
        "--model-path": "give the model without a flag: atomc serve MODEL",
        "--max-running-requests": "use --max-num-seqs",
        "--num-gpu-blocks-override": "use --num-blocks",
        "--pipeline-parallel-size": _ONE_DEVICE,
        "--random-seed": "use --seed",
        "--revision": "download that revision, and give its directory",
        "--schedule-policy": "use --scheduling-policy",
        "--speculative-config": "use --speculative-tokens N, and perhaps --ngram-min and --ngram-max",
        "--swap-space": "who gives way is computed again, nothing is swapped: leave it out",
        "--task": "generation and embeddings are both served: leave it out",
        "--tensor-parallel-size": _ONE_DEVICE,
        "--tokenizer": "the tokenizer is the checkpoint's own",
        "--tp": _ONE_DEVICE,
        "--trust-remote-code": "code that comes with a checkpoint is never run: leave it out",
        "-tp": _ONE_DEVICE,
    },
}
