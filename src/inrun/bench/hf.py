"""Models of transformers with random weights, built from a configuration without network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

SMALL: dict[str, dict[str, Any]] = {  # where the usual size is 7 billion parameters
    "llama": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    },
}  # fmt: skip
# random tokens have no special ones; a model that is trained has no cache
PLAIN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False}


def causal_model(name: str, length: int, vocab: int | None) -> tuple[nn.Module, int]:
    """A causal language model and its vocabulary.

    Args:
        name: a model type or a folder with a config.json, then overrides of its configuration:
            ``llama,hidden_size=256``.
        length: tokens of a sequence.
        vocab: size of the vocabulary; None is the configuration's.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("hf: models need transformers: pip install 'inrun[hf]'") from None
    kind, *pairs = name.split(",")
    overrides = PLAIN | dict(_pair(p) for p in pairs) | ({"vocab_size": vocab} if vocab else {})
    rank = overrides.pop("lora", None)
    if Path(kind, "config.json").is_file():
        config = AutoConfig.from_pretrained(kind, local_files_only=True, **overrides)
    else:
        try:
            config = AutoConfig.for_model(kind, **(SMALL.get(kind, {}) | overrides))
        except ValueError as error:
            if "Unrecognized" not in str(error):
                raise
            raise ValueError(
                f"--model hf:{kind}: neither a model type of transformers nor a folder with a "
                "config.json"
            ) from None
    for key, value in config.to_dict().items():  # with dropout variants would differ by chance
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    longest = getattr(config, "max_position_embeddings", None) or length
    if length > longest:
        raise ValueError(f"--length {length}: hf:{kind} has {longest} positions")
    try:
        model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        if "Unrecognized" not in str(error):
            raise
        raise ValueError(f"--model hf:{kind}: transformers has no causal model of it") from None
    model.loss_type = "ForCausalLM"  # GPT-2's head has another name; transformers would warn
    return model if rank is None else with_lora(model, rank), config.vocab_size


def image_model(name: str) -> tuple[nn.Module, int]:
    """A vision transformer for image classification, and the size of its images; ``name`` is
    ``vit`` with overrides of its configuration."""
    try:
        from transformers import ViTConfig, ViTForImageClassification
    except ImportError:
        raise ValueError("hf: models need transformers: pip install 'inrun[hf]'") from None
    overrides: dict[str, Any] = {"image_size": 224, "num_labels": 10}
    overrides |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    overrides |= dict(_pair(p) for p in name.split(",")[1:])
    return ViTForImageClassification(ViTConfig(**overrides)), int(overrides["image_size"])


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model with adapters of this rank on all linear layers but the head; only these train."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("lora=...: needs peft: pip install peft") from None
    wanted = LoraConfig(r=rank, lora_dropout=0.0, target_modules="all-linear")
    whole: Any = model
    adapted: nn.Module = get_peft_model(whole, wanted)
    return adapted


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--model hf:...,{text}: overrides are KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
