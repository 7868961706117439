"""Arguments of torch's recurrent operations, and where the examples are in their outputs.

``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` run whole sequences: N of them in columns
beside each other, as [T, N, I], [N, T, I] (``batch_first``) or packed [rows, I]. The states are
[layers · directions, N, H]. The cells run one step of [N, I].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from inrun.tensors.layout import Find, Layout, agree, batched, name_of, tensors_in

SEQUENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = tuple(f"{name}_cell" for name in SEQUENCES)
_NAMES = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


class Options(NamedTuple):
    """Arguments of a call on sequences other than tensors."""

    packed: bool
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def state(self) -> int:
        """Position of the argument ``hx``; the weights come after it."""
        return 2 if self.packed else 1

    @property
    def columns(self) -> int:
        """The dimension of the input that holds the N sequences; packed ones have none."""
        return 0 if self.batch_first else 1


def options(value: Callable[[int, str], Any]) -> Options:
    """``value(position, keyword)`` is an argument, None if it was not given."""
    second = value(1, "batch_sizes")
    packed = isinstance(second, Tensor) and not second.is_floating_point()  # no state
    start = 4 if packed else 3
    biases, layers, dropout, train, both, first = (
        value(start + i, name) for i, name in enumerate(_NAMES)
    )
    return Options(packed, biases, layers, dropout, train, both, bool(first) and not packed)


def argument(args: Any, kwargs: Any) -> Callable[[int, str], Any]:
    """``value`` of these arguments."""

    def value(position: int, keyword: str) -> Any:
        return args[position] if position < len(args) else kwargs.get(keyword)

    return value


def sequence_layout(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """The layout of one output. Which one it is shows in its shape; where that fits the states too
    and these have the examples elsewhere, there is no answer."""
    layouts = output_layouts(func, args, kwargs, find)
    x, asked = args[0], options(argument(args, kwargs))
    if layouts is None:
        return None
    states = [t.shape for t in tensors_in(argument(args, kwargs)(asked.state, "hx"))]
    found = {layouts[1]} if out.shape in states else set[Layout]()
    if out.shape[:2] == x.shape[:2]:
        found.add(layouts[0])
    return found.pop() if len(found) == 1 else None


def output_layouts(func: Any, args: Any, kwargs: Any, find: Find) -> list[Layout] | None:
    """The layouts of all outputs; None where the examples cannot be told apart in them: they are
    the steps of a sequence, say."""
    value = argument(args, kwargs)
    if name_of(func) in CELLS:
        columns = _agree(0, value(0, "input"), value(1, "hx"), 0, args[2:], kwargs, find)
        return None if columns is None else [columns] * 2
    asked = options(value)
    x = value(0, "input")
    if asked.packed or x.ndim != 3:
        return None
    hx, others = value(1, "hx"), (value(2, "params"),)
    columns = _agree(asked.columns, x, hx, 1, others, {}, find)
    if columns is None:
        return None
    state = replace(columns, dim=1)
    return [replace(columns, dim=asked.columns), state, state]


def cell_layout(func: Any, args: Any, kwargs: Any, out: Tensor, find: Find) -> Layout | None:
    """All outputs of a cell are [N, H]."""
    layouts = output_layouts(func, args, kwargs, find)
    return None if layouts is None else layouts[0]


def _agree(
    dim: int, x: Tensor, hx: Any, states: int, others: Any, kwargs: Any, find: Find
) -> Layout | None:
    """The layout of the columns, as if they were dimension 0: they are dimension ``dim`` of ``x``
    and ``states`` of ``hx``."""
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "hx")}
    if batched(others, rest, find):  # weights made of the examples
        return None
    of_input = [replace(a, dim=a.dim - dim) for _, a in batched((x,), {}, find)]
    of_states = [replace(a, dim=a.dim - states) for _, a in batched((hx,), {}, find)]
    found = agree(of_input + of_states)
    return found if found is not None and found.dim == 0 else None
