"""Which parameters have one curvature together: a weight and the bias that is added to its product.

The bias is one more column of the weight, whose input is always 1. Which bias belongs to which
weight is known of torch's own layers (and transformers' Conv1D); every other parameter stands
alone, which is an approximation a little coarser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Place:
    """A parameter with a curvature of its own.

    Args:
        name: the weight, or a parameter alone.
        bias: what is joined to it.
        transposed: the weight is [I, O] instead of [O, I].
        table: rows are looked up in it.
    """

    name: str
    bias: str | None = None
    transposed: bool = False
    table: bool = False

    @property
    def names(self) -> list[str]:
        return [self.name] if self.bias is None else [self.name, self.bias]


def places(modules: Iterable[nn.Module], params: Mapping[str, Tensor]) -> dict[str, Place]:
    """The places of all these parameters, by the name of the weight."""
    names = {id(p): k for k, p in params.items()}
    found: dict[str, Place] = {}
    biases: set[str] = set()
    for module in modules:
        if isinstance(module, _TABLES) and (name := names.get(id(module.weight))):
            found[name] = Place(name, table=True)
        for weight, bias, transposed in _pairs(module):
            w, b = names.get(id(weight)), names.get(id(bias))
            if w is None or b is None or b in biases or found.get(w, Place(w)) != Place(w):
                continue  # frozen, or shared with another layer
            found[w] = Place(w, b, transposed)
            biases.add(b)
    found = {k: p for k, p in found.items() if k not in biases}
    return found | {k: Place(k) for k in params if k not in found and k not in biases}


def _pairs(module: nn.Module) -> Iterator[tuple[Tensor | None, Tensor | None, bool]]:
    """Weights of a module with their biases; True: the weight is [I, O]."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        yield module.weight, module.bias, False
    elif isinstance(module, nn.MultiheadAttention):
        yield module.in_proj_weight, module.in_proj_bias, False
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear layer
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, Tensor) and isinstance(bias, Tensor):
            yield weight, bias, True
