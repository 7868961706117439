"""Which form of a layer's per-example gradients is cheaper: a model of time and memory.

For one product y = x Wᵀ with B examples of T tokens, I inputs and O outputs (records.py), scored
along Q directions (targets times estimators):

* *materialise*: g_i of every example by a batched product, B·T·I·O multiplications; B·I·O numbers
  are written, and read by the contraction (Q·B·I·O multiplications). With ``training="fast"`` they
  are read once more by the sum over examples, which then is the layer's own weight gradient;
* *ghost*: the contraction is Q more products, B·T·I·O multiplications each; their B·T·O results are
  written, and read with δ. The layer's own weight gradient is formed as always.

In eager mode a GPU works while the host launches the next operations, so the slower of the two
counts. For small batches that is the host, to which a layer in ghost form is nearly nothing: in
the backward pass δ is remembered and that is all (use.py).

Only shapes, type and device are looked at: compiled graphs are planned on tensors without data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layer:
    """The shape of one use of a weight matrix; ``device`` is a type ("cpu", "cuda")."""

    B: int
    T: int
    I: int  # noqa: E741
    O: int  # noqa: E741
    dtype: torch.dtype
    device: str
    Q: int = 1
    eager: bool = False  # the host launches each operation, in the backward pass too


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, and what a form costs however small the layer is."""

    products: float  # multiplications with their additions, in one product for all examples
    batched: float  # the same in a product for each example
    bytes: float  # read or written
    ghost: float  # seconds: launches of one layer
    dense: float


# Fitted by benchmarks/cost_model.py --fit to the time of a layer in both forms over many shapes
# (T from 1 to 1024, widths from 128 to 3072, B from 4 to 64). cpu: float32, one thread of a Xeon,
# benchmarks/results/cost_model-cpu.json. cuda: an H200, fitted to the largest shapes of an earlier
# run; cost_model-h200.json judges them over all shapes, where they do better than a fit to these.
# False for types of 4 bytes and more, True for 2. "bytes" is what such passes reach. Only ratios of
# these numbers matter, so other devices of a kind use them too.
RATES = {
    ("cpu", False): Rates(6.6e10, 6.4e10, 1.6e10, 7.6e-5, 4.0e-5),
    ("cuda", False): Rates(2.7e13, 2.8e13, 3.8e12, 8.3e-5, 4.5e-5),
    ("cuda", True): Rates(5.5e14, 6.2e14, 2.7e12, 5.6e-5, 0.0),
}
# A form that keeps more than so many times the numbers of the other is not taken, where these are
# more bytes than so many. For each direction up to so many, gradients may be as many times larger:
# they save a product.
MEMORY, SMALL, MANY = 3, 2**26, 8
# Eager mode: seconds of the host for what inrun does with a layer in either form (12 layers of
# GPT-2 on a Xeon; beside an H200). On a GPU also for the layer with all that belongs to it in the
# training, and what the GPU does for it beside its products, in passes over its numbers.
EAGER = {"cpu": (6e-5, 1.1e-4), "cuda": (5e-5, 2e-4)}
HOST, AROUND = 3e-4, 45
FEW = 4  # directions for which an operation runs again rather than have its small records made
TOGETHER = 64  # directions that gradients are read once for (scoring/contraction_kernel.py)


def materialise(layer: Layer, fast: bool) -> bool:
    """Is it better to form the layer's per-example gradients?"""
    ghost, dense = layer.T * (layer.I + layer.O), layer.I * layer.O
    large = layer.B * max(ghost, dense) * layer.dtype.itemsize > SMALL
    if large and ghost > MEMORY * dense:
        return True
    if large and dense > MEMORY * min(layer.Q, MANY) * ghost:
        return False
    in_ghost_form, materialised = seconds(layer, fast)
    return materialised <= in_ghost_form


def seconds(layer: Layer, fast: bool, rates: Rates | None = None) -> tuple[float, float]:
    """Time in ghost form and materialised, less what both forms have in common."""
    rates = rates or rates_of(layer)
    (products, moved), (batched, moved_dense) = work(layer, fast)
    ghost = products / rates.products + moved / rates.bytes
    dense = batched / rates.batched + moved_dense / rates.bytes
    if not layer.eager:
        return ghost + rates.ghost, dense + rates.dense
    by_ghost, by_dense = EAGER["cpu" if layer.device == "cpu" else "cuda"]
    by_ghost *= layer.Q
    if layer.device == "cpu":
        return ghost + by_ghost, dense + by_dense
    tokens = layer.B * layer.T
    size = tokens * (layer.I + layer.O) * layer.dtype.itemsize
    own = 3 * tokens * layer.I * layer.O / rates.products + AROUND * size / rates.bytes
    return max(own + ghost, HOST + by_ghost), max(own + dense, HOST + by_dense)


def remember(size: int, Q: int) -> bool:
    """Is it better to keep this many bytes of an operation's input and δ than to make its small
    records in the backward pass?"""
    return size <= SMALL and Q <= FEW


def work(layer: Layer, fast: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Multiplications and bytes in ghost form and materialised.

    A number of the ghost form's results is written, and read beside δ's.
    """
    B, T, I, O = layer.B, layer.T, layer.I, layer.O  # noqa: E741
    size = layer.dtype.itemsize
    tokens, weights = B * T * (I + O) * size, I * O * 4
    passes = 5 * size if layer.device == "cpu" else 3 * size
    readings = -(-layer.Q // TOGETHER)
    ghost = tokens + layer.Q * (B * T * O * passes + weights)
    dense = tokens + (1 + readings) * B * I * O * size + (layer.Q - 1) * weights
    if fast:
        ghost += tokens + weights
        dense += B * I * O * size + weights
    products = B * T * I * O
    return ((layer.Q + fast) * products, ghost), (products + (layer.Q - 1) * B * I * O, dense)


def rates_of(layer: Layer) -> Rates:
    """Those of the device, or of the one that is most like it."""
    if layer.device == "cpu":
        return RATES["cpu", False]
    return RATES["cuda", layer.dtype.itemsize < 4]
