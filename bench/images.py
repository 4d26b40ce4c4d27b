"""Time from an image to the first token: our runtime beside transformers, equal random weights.

    python bench/images.py --json bench/results/images-h200.json
    python bench/images.py --shape tiny --device cpu --glue eager --rounds 2

Each round has an image of --pixels x --pixels random pixels that no round before it had. Figures
are medians over --rounds, in milliseconds, the two ways in turn:
    prepare   the image processor of transformers, on the host, as the runtime calls it
    atomc     `LLM.generate` of one token, from the patches: encoder, prompt, sampling
    encoder   of these, the vision encoder alone with the copy of the patches to the device
    prompt    `LLM.generate` of one token when the embeddings of the image are held
    eager     transformers' generate(max_new_tokens=1), from the same patches in host memory
speedup is eager / atomc, and with_prepare the same with the time of the image processor on both
sides. same_token counts the rounds in which both chose the same token: of random weights in bf16
some may differ.

Shape "2b" is Qwen3-VL-2B-Instruct. Without Pillow the image processor cannot run: patches are then
random numbers, and prepare is missing.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import profile
from torch import Tensor, nn

from atomc.runtime.images.processor import ImageProcessor
from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import PromptImage
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.step import ImagePixels

# The sizes of Qwen3-VL-2B; token ids and rotary settings, which cost nothing, like those of its family.
QWEN3_VL_2B: dict[str, Any] = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
TINY: dict[str, Any] = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
    "tie_word_embeddings": True,
    "text_config": {
        **QWEN3_VL_2B["text_config"],
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rope_parameters": {
            **QWEN3_VL_2B["text_config"]["rope_parameters"],
            "mrope_section": [4, 2, 2],
        },
        "vocab_size": 128,
    },
    "vision_config": {
        **QWEN3_VL_2B["vision_config"],
        "deepstack_visual_indexes": [0, 1],
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 64,
    },
}
# The config, and the side of its images.
SHAPES = {"2b": (QWEN3_VL_2B, 1024), "tiny": (TINY, 64)}
WARM_UPS = 2
TEXT = 24  # tokens beside the image
BLOCK = 16


def theirs_of(config: dict[str, Any], device: str) -> nn.Module:
    """transformers' class with random weights in bf16."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    with torch.device(device):
        made = Qwen3VLForConditionalGeneration._from_config(
            Qwen3VLConfig(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    made.generation_config.eos_token_id = made.generation_config.pad_token_id = None
    return made.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return]


def ours_of(theirs: nn.Module, device: str, glue: str, length: int, patches: int) -> LLM:
    """Our runtime with the same weights, read from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)  # type: ignore[operator]
        return LLM(
            folder,
            dtype="bfloat16",
            device=device,
            options={"glue": glue},
            progress=False,
            max_model_len=length + BLOCK,
            max_num_seqs=1,
            max_num_batched_tokens=length,
            max_image_patches=patches,
            num_blocks=4 * (length // BLOCK + 2),
            enable_prefix_caching=False,
        )


def image_processor(config: dict[str, Any]) -> ImageProcessor | None:
    """With the patch and merge sizes of the shape. None: Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        return None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision = config["vision_config"]
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        size={"shortest_edge": 64 * 64, "longest_edge": 4096 * 4096},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return ImageProcessor(processor)


def prepared(
    processor: ImageProcessor | None, config: dict[str, Any], side: int, seed: int
) -> tuple[PromptImage, float | None]:
    """An image of random pixels as patches, and the milliseconds that the processor took."""
    random = np.random.default_rng(seed)
    if processor is not None:
        from PIL import Image

        image = Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
        started = time.perf_counter()
        found = processor.prepare(image)
        return found, 1e3 * (time.perf_counter() - started)
    vision = config["vision_config"]
    grid = (1, side // vision["patch_size"], side // vision["patch_size"])
    width = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = random.uniform(-1, 1, (grid[1] * grid[2], width)).astype(np.float32).tobytes()
    length = grid[1] * grid[2] // vision["spatial_merge_size"] ** 2
    return PromptImage(0, length, grid, pixels, hashlib.blake2b(pixels).digest()), None


def prompt_of(image: PromptImage, config: dict[str, Any]) -> dict[str, Any]:
    """As LLM.generate takes it: text, the image, text."""
    before = [config["vision_start_token_id"]]
    after = [config["vision_end_token_id"], *range(5, 5 + TEXT - 2)]
    placed = PromptImage(len(before), image.length, image.grid, image.pixels, image.digest)
    tokens = [*before, *[config["image_token_id"]] * image.length, *after]
    return {"prompt_token_ids": tokens, "images": [placed]}


def eager(theirs: nn.Module, prompt: dict[str, Any], config: dict[str, Any], device: str) -> int:
    """The first token by transformers' generate."""
    (image,) = prompt["images"]
    ids = torch.tensor([prompt["prompt_token_ids"]], device=device)
    pixels = np.frombuffer(image.pixels, np.float32).reshape(image.num_patches, -1).copy()
    with torch.inference_mode():
        found: Tensor = theirs.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.from_numpy(pixels).to(device),
            image_grid_thw=torch.tensor([image.grid], device=device),
            mm_token_type_ids=(ids == config["image_token_id"]).int(),
            max_new_tokens=1,
            do_sample=False,
        )
    return int(found[0, -1])


def ms_of(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What the call returns, and its milliseconds until the device has done it."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return found, 1e3 * (time.perf_counter() - started)


def figures(
    shape: str,
    device: str,
    side: int | None,
    rounds: int,
    glue: str = "auto",
    profiled: bool = False,
) -> dict[str, Any]:
    config, default = SHAPES[shape]
    side = side or default
    processor = image_processor(config)
    first, _ = prepared(processor, config, side, 0)
    prompt = prompt_of(first, config)
    theirs = theirs_of(config, device)
    patches = prompt["images"][0].num_patches
    started = time.perf_counter()
    llm = ours_of(theirs, device, glue, len(prompt["prompt_token_ids"]), patches)
    start = time.perf_counter() - started
    encoder = llm.engine.executor.encoder  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    times: dict[str, list[float]] = {}
    same = 0
    for turn in range(rounds + WARM_UPS):
        image, prepare = prepared(processor, config, side, turn + 1)
        prompt = prompt_of(image, config)
        alone = [ImagePixels(b"", image.length, image.grid, image.pixels)]

        def ours(prompt: dict[str, Any] = prompt) -> int:
            (completion,) = llm.generate([prompt], params)  # type: ignore[list-item]
            return int(completion.token_ids[0])

        encoded = llm.engine.stats().images_encoded
        token, atomc = ms_of(ours, device)
        assert llm.engine.stats().images_encoded == encoded + 1, "the image was held already"
        again, held = ms_of(ours, device)
        assert again == token and llm.engine.stats().images_encoded == encoded + 1
        _, tower = ms_of(lambda alone=alone: encoder.embeddings(alone), device)  # type: ignore[misc]
        expected, stock = ms_of(lambda prompt=prompt: eager(theirs, prompt, config, device), device)  # type: ignore[misc]
        if turn < WARM_UPS:
            continue
        same += token == expected
        found = {"prepare": prepare, "atomc": atomc, "encoder": tower, "prompt": held}
        for name, value in {**found, "eager": stock}.items():
            if value is not None:
                times.setdefault(name, []).append(value)
    if profiled:
        print("the vision encoder", file=sys.stderr)
        profile(lambda: encoder.embeddings(alone))
        print("the whole", file=sys.stderr)
        profile(ours)
    llm.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    result: dict[str, Any] = {"shape": shape, "pixels": side, "image_tokens": first.length}
    result |= {"prompt_tokens": len(prompt["prompt_token_ids"]), "start_s": start}
    result |= {f"{name}_ms": value for name, value in medians.items()}
    result["speedup"] = medians["eager"] / medians["atomc"]
    if "prepare" in medians:
        prepare = medians["prepare"]
        result["with_prepare"] = (medians["eager"] + prepare) / (medians["atomc"] + prepare)
    return {**result, "same_token": same, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="2b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--pixels", type=int, help="the side of the images (that of the shape)")
    parser.add_argument("--rounds", default=10, type=int)
    parser.add_argument("--glue", default="auto", choices=["eager", "inductor", "auto"])
    parser.add_argument("--profile", action="store_true", help="print the kernels of an image")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: expected at least 1")
    found = figures(args.shape, args.device, args.pixels, args.rounds, args.glue, args.profile)
    print(
        "  ".join(
            f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in found.items()
        ),
        flush=True,
    )
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        about = {"device": device, "torch": torch.__version__}
        command = " ".join(["python", *sys.argv])
        with args.json.open("a") as file:
            file.write(json.dumps({**found, **about, "command": command}) + "\n")


if __name__ == "__main__":
    main()
