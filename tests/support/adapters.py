"""LoRA adapters with random weights, in the format of PEFT, for the tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8
# Of the scale of the base model's own projections, so that the answers are others.
STRENGTH = 1.0


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Writes an adapter of the attention's projections of `model`; returns its folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, head = config["hidden_size"], config["head_dim"]
    shapes = {
        "q_proj": (width, heads * head),
        "k_proj": (width, kv_heads * head),
        "v_proj": (width, kv_heads * head),
        "o_proj": (heads * head, width),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) * STRENGTH * shape[1] ** -0.5
                weights[f"{key}.{part}.weight"] = values.to(torch.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(model),
                "r": RANK,
                "lora_alpha": RANK,
                "target_modules": sorted(shapes),
                "bias": "none",
            }
        )
    )
    return folder
