"""Generate text without a server: a batch of prompts, samples of one prompt, a stream.

python examples/offline.py                 the bundled model
python examples/offline.py --model path/to/Qwen3-0.6B
"""

import argparse

from atomc import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates text from a few prompts.")
    parser.add_argument("--model", default="", help="a folder or a name; the bundled model without")
    flags = parser.parse_args()

    with LLM(flags.model) if flags.model else LLM() as llm:
        prompts = ["In the beginning", "And he said to", "The water of the river"]
        greedy = SamplingParams(max_tokens=12, temperature=0.0)
        for prompt, completion in zip(prompts, llm.generate(prompts, greedy), strict=True):
            print(f"{prompt} |{completion.text!r} ({completion.finish_reason})")

        # Samples share the prompt's KV cache; a seed makes them the same in every run.
        sampled = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, n=3, seed=7, logprobs=0)
        for completion in llm.generate(prompts[:1], sampled):
            likelihood = sum(token.logprob for token in completion.logprobs or ())
            print(f"sample {likelihood:7.2f} {completion.text!r}")

        print("stream", end=" ")
        for piece in llm.stream(prompts[0], greedy):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
