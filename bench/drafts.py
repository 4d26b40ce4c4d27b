"""How many outputs with draft tokens differ from those without.

    python bench/drafts.py --dtype bfloat16
    python bench/drafts.py --dtype float64
    python bench/drafts.py --dtype bfloat16 --batch-invariant

Prompts of random sentences of the model's own, drafts by n-grams. MODEL is the demo model.
"""

import argparse

import torch

from atomc import LLM, SamplingParams
from atomc.runtime.requests.request import Completion

SEED = 0
PROMPT_TOKENS = 24


def outputs(
    prompts: list[list[int]],
    params: list[SamplingParams],
    drafts: int,
    arguments: argparse.Namespace,
) -> list[Completion]:
    """The answers with this many draft tokens a step; prints how many were right."""
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        speculative_tokens=drafts,
        options={"batch_invariant": arguments.batch_invariant},
        progress=False,
    )
    found = llm.generate(prompts, params)
    stats = llm.engine.stats()
    if stats.drafts:
        print(f"{stats.accepted} of {stats.drafted} draft tokens right")
    llm.close()
    return found


def prompts_of(model: str | None, number: int) -> list[list[int]]:
    """Beginnings of texts that the model writes itself, so that drafts are often right."""
    llm = LLM(model, progress=False)
    params = [
        SamplingParams(max_tokens=PROMPT_TOKENS, temperature=1.0, seed=SEED + i, ignore_eos=True)
        for i in range(number)
    ]
    found = llm.generate([[0]] * number, params)
    llm.close()
    return [list(completion.token_ids) for completion in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--speculative-tokens", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.dtype}")
    prompts = prompts_of(arguments.model, arguments.requests)
    for name, temperature in (("greedy", 0.0), ("sampled, temperature 0.8", 0.8)):
        params = [
            SamplingParams(
                max_tokens=arguments.tokens, temperature=temperature, seed=i, ignore_eos=True
            )
            for i in range(len(prompts))
        ]
        drafted = outputs(prompts, params, arguments.speculative_tokens, arguments)
        pairs = zip(drafted, outputs(prompts, params, 0, arguments), strict=True)
        differ = sum(a.token_ids != b.token_ids for a, b in pairs)
        print(f"{name}: {differ} of {len(prompts)} outputs of {arguments.tokens} tokens differ")


if __name__ == "__main__":
    main()
