"""The problem that is timed: a model by name, a batch and targets of seeded random data.

Models take a batch as keyword arguments and return its loss (or an output that has one), so that
``torch.compile(model)`` compiles the loss too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inrun.gpt import GPT, gpt2_weights

if TYPE_CHECKING:
    from inrun.bench.options import Options

Batch = dict[str, Tensor]
SMALL_VOCABULARY = 256
IMAGE, CLASSES = (3, 32, 32), 10


@dataclass(frozen=True)
class Problem:
    """What all variants train on. The model is never trained itself: variants train copies."""

    model: nn.Module
    batch: Batch
    targets: dict[str, Batch]
    device: torch.device
    autocast: bool  # bfloat16

    @staticmethod
    def loss(model: Callable[..., Any], batch: Batch) -> Tensor:
        out = model(**batch)
        return out if isinstance(out, Tensor) else out.loss

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)

    @property
    def examples(self) -> int:
        return len(self.batch["labels"])

    def double(self) -> Problem:
        """The same in float64; without its model, whose weights are those of step 0."""

        def wide(batch: Batch) -> Batch:
            return {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}

        targets = {k: wide(batch) for k, batch in self.targets.items()}
        return replace(self, batch=wide(self.batch), targets=targets, autocast=False)


def make_problem(options: Options) -> Problem:
    """The model, its training batch and the validation batches, one per target."""
    dtypes = {"float64": torch.float64, "bf16-weights": torch.bfloat16}
    dtype = dtypes.get(options.dtype, torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model, draw = _model(options.model, options.length, options.vocab)

        def rows(n: int) -> Batch:
            batch = {k: x.to(options.device) for k, x in draw(n).items()}
            return {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}

        return Problem(
            model=model.to(dtype).train(),
            batch=rows(options.batch),
            targets={f"target{q}": rows(options.validation) for q in range(options.targets)},
            device=torch.device(options.device),
            autocast=options.dtype == "bf16",
        )


def _model(name: str, length: int, vocab: int | None) -> tuple[nn.Module, Callable[[int], Batch]]:
    """A model by name and what draws rows for it."""
    if name == "convnet":
        if vocab is not None:
            raise ValueError("--vocab is for text models, not for convnet")
        return ConvNet(), images
    if re.match(r"hf:vit(,|$)", name):
        from inrun.bench.hf import image_model

        found, side = image_model(name.removeprefix("hf:"))
        return found, lambda n: pixels(n, side)
    if name.startswith("hf:"):
        from inrun.bench.hf import causal_model

        found, size = causal_model(name.removeprefix("hf:"), length, vocab)
        return found, lambda n: tokens(n, length, size, "input_ids")
    if name == "gpt2":
        size = vocab or 50257
        gpt = LanguageModel(12, 768, size, max(length, 1024))
    elif shape := re.fullmatch(r"gpt-(\d+)x(\d+)", name):
        size = vocab or SMALL_VOCABULARY
        gpt = LanguageModel(int(shape[1]), int(shape[2]), size, length)
    else:
        raise ValueError(
            f"--model {name}: choose gpt2, gpt-LAYERSxWIDTH (gpt-4x128), convnet, hf:NAME (a model "
            "type of transformers, such as hf:gpt2 or hf:llama) or hf:FOLDER (with a config.json)"
        )
    return gpt, lambda n: tokens(n, length, size)


def tokens(n: int, length: int, vocab: int, shifted: str | None = None) -> Batch:
    """Random sequences. A model that shifts the labels itself gets the same under both names."""
    if shifted is not None:
        drawn = torch.randint(vocab, (n, length))
        return {shifted: drawn, "labels": drawn}
    drawn = torch.randint(vocab, (n, length + 1))
    return {"inputs": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def images(n: int) -> Batch:
    return {"inputs": torch.randn(n, *IMAGE), "labels": torch.randint(CLASSES, (n,))}


def pixels(n: int, side: int) -> Batch:
    """Images as the vision models of transformers take them."""
    return {"pixel_values": torch.randn(n, 3, side, side), "labels": torch.randint(CLASSES, (n,))}


class LanguageModel(GPT):
    """A GPT that returns the loss of a batch, with GPT-2's heads and weights."""

    def __init__(self, layers: int, width: int, vocab: int, positions: int) -> None:
        if layers < 1 or width < 32 or width % 32:
            raise ValueError(f"gpt-{layers}x{width}: the width must be a multiple of 32")
        heads = width // (64 if width % 64 == 0 and width >= 256 else 32)
        super().__init__(vocab, width, layers, heads, positions, gelu="tanh")
        gpt2_weights(self)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(inputs).flatten(0, 1), labels.flatten())


class ConvNet(nn.Module):
    """A small ResNet with GroupNorm: examples do not meet."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE[0], width, 3, padding=1, bias=False)
        stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.Sequential(*(Residual(*shape) for shape in stages))
        self.norm = nn.GroupNorm(8, 4 * width)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(inputs))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.relu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.relu(self.norm2(hidden)))
