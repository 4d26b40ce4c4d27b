"""LoRA adapters as peft saves them, written by hand, and the weights that they make."""

import json
import math

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder, shapes, *, rank=4, alpha=8, seed=1, size=0.3, **differs):
    """An adapter of random weights for these layers: path -> [N, K] of the layer's weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, (outputs, inputs) in shapes.items():
        key = f"base_model.model.{path}"
        a = torch.randn(rank, inputs, generator=generator) * size
        b = torch.randn(outputs, rank, generator=generator) * size
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({path.rpartition(".")[2] for path in shapes}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    (folder / CONFIG).write_text(json.dumps(config | differs))
    return folder


def shapes_of(model, *names):
    """The layers with these last names, by path."""
    return {
        path: tuple(module.weight.shape)
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in names
    }


def merge(model, folder):
    """Add the adapter to the model's weights: W + scale * B @ A."""
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    with torch.no_grad():
        for key, a in tensors.items():
            path, found, _ = key.removeprefix("base_model.model.").partition(".lora_A.weight")
            if not found:
                continue
            b = tensors[key.replace("lora_A", "lora_B")]
            rank = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
            weight = model.get_submodule(path).weight
            weight += (config["lora_alpha"] / rank * b @ a).to(weight.dtype)
    return model
