"""Recurrent operations: ``nn.LSTM``, ``GRU``, ``RNN`` and their cells.

torch runs them as one operation. When δ of its outputs arrives, the recurrence is run again step
by step, and autograd gives the gradients of the gates before their non-linearity,

    z_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh,

so that g of W_ih is Σ_t δz_t ⊗ x_t, of W_hh Σ_t δz_t ⊗ h_{t-1}, of both biases Σ_t δz_t. (In a GRU
the new gate is tanh(W_ih x + b_ih + r (W_hh h + b_hh)): of its hidden part δ is r δz.) A projection
W_hr of the LSTM has h_t = W_hr m_t, so its g is Σ_t δh_t ⊗ m_t.

Legend: R rows = (time step, sequence), steps first, as packed sequences have them; N sequences;
n_t ≤ N of them have a step t; H hidden numbers; G = gates · H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.gradients.call import Call
from inrun.gradients.records import wide_type
from inrun.tensors.recurrent import CELLS, options

_DROPOUT = (
    "dropout between its layers is random inside the operation, so that its gradient cannot be "
    "computed again. Use one module for each layer (num_layers=1) and nn.Dropout between them: the "
    "same model"
)

# One step: gates of the input [n, G], of the state [n, G], and the state → h, c, r.
# c is an LSTM's cell, r the factor of a GRU's hidden part.
Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def _lstm(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, None]:
    i, f, g, o = (x + hidden).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, None


def _gru(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return (1 - z) * n + z * h, c, r


def _rnn(f: Callable[[Tensor], Tensor]) -> Step:
    return lambda x, hidden, h, c: (f(x + hidden), c, None)


_STEPS: dict[str, Step] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}


class Weights(NamedTuple):
    """One layer in one direction: the leaves of its weights."""

    ih: int
    hh: int
    b_ih: int | None = None
    b_hh: int | None = None
    hr: int | None = None


@dataclass
class Part:
    """One layer in one direction, run again. Lists have one tensor [n_t, …] for each step."""

    weights: Weights
    inputs: Tensor  # [R, I]
    gates: Tensor  # [R, G]: W_ih x + b_ih, whose gradient is δz
    before: list[Tensor] = field(default_factory=list)  # h_{t-1}
    inner: list[Tensor] = field(default_factory=list)  # m_t, before the projection
    after: list[Tensor] = field(default_factory=list)  # h_t
    factors: list[Tensor] = field(default_factory=list)  # r of a GRU


class Use(NamedTuple):
    """One use of a weight: g = Σ_rows δ ⊗ a, or Σ_rows δ of a bias."""

    leaf: int
    a: Tensor | None  # [R, I]
    delta: Tensor  # [R, O]


@dataclass
class Recurrence:
    """A call taken apart: its input, the lengths of its steps, leaves of its states and weights."""

    kind: str
    input: Tensor  # [T, N, I], or [R, I] if packed or of a cell
    lengths: list[int]  # n_t
    states: list[int]
    weights: list[Weights]
    directions: int = 1
    packed: bool = False

    @property
    def columns(self) -> int:
        """N."""
        return self.lengths[0]

    @property
    def rows(self) -> Tensor:
        """The input, [R, I]."""
        return self.input.reshape(-1, self.input.shape[-1])


def taken_apart(call: Call) -> Recurrence:
    """Read the arguments of a call."""
    if call.name in CELLS:
        x = call.value(0, "input")
        given = [call.at(2 + i, name) for i, name in enumerate(("w_ih", "w_hh", "b_ih", "b_hh"))]
        ih, hh, *biases = [p if _given(call, p) else None for p in given]
        assert ih is not None and hh is not None
        kind = call.name.removesuffix("_cell")
        return Recurrence(kind, x, [len(x)], _leaves(call, 1, "hx"), [Weights(ih, hh, *biases)])
    asked = options(lambda position, keyword: call.value(position, keyword))
    if asked.dropout and asked.train and asked.layers > 1:
        raise NotImplementedError(_DROPOUT)
    x = call.value(0, "data" if asked.packed else "input")
    if asked.packed:
        lengths = call.value(1, "batch_sizes").tolist()
    else:
        x = x.transpose(0, 1) if asked.batch_first else x
        lengths = [x.shape[1]] * x.shape[0]
    directions = 2 if asked.bidirectional else 1
    flat = _leaves(call, asked.state + 1, "params")
    each = len(flat) // (asked.layers * directions)
    parts = [flat[i : i + each] for i in range(0, len(flat), each)]
    weights = [_named(part, asked.has_biases) for part in parts]
    states = _leaves(call, asked.state, "hx")
    return Recurrence(call.name, x, lengths, states, weights, directions, asked.packed)


def _named(part: Sequence[int], biases: bool) -> Weights:
    ih, hh, *rest = part
    b_ih, b_hh = rest[:2] if biases else (None, None)
    projection = rest[2:] if biases else rest
    return Weights(ih, hh, b_ih, b_hh, *projection)


def _leaves(call: Call, position: int, keyword: str) -> list[int]:
    """The leaves of an argument that is a tensor or a list of them."""
    found = call.at(position, keyword)
    return [found] if found is not None else call.places(position, keyword)


def _given(call: Call, leaf: int | None) -> bool:
    return leaf is not None and call.leaves[leaf] is not None


def uses(
    call: Call, deltas: Sequence[Tensor | None]
) -> tuple[Recurrence, list[Use], dict[int, Tensor]]:
    """Every use of a watched weight, rows in the order of packed data; and the gradients of states
    and input that are parametric themselves, by leaf.

    ``deltas`` are of all outputs, in their order; None where nothing depends on one.
    """
    found = taken_apart(call)
    values = _Values(call, found)
    with torch.enable_grad():
        outs, parts = _run(found, values)
        pairs = [
            (y, d) for y, d in zip(outs, _in_rows(call, deltas), strict=False) if d is not None
        ]
        projected = [p for p in parts if p.weights.hr is not None]
        steps = [h for p in projected for h in p.after]
        wanted = [p.gates for p in parts] + list(values.free.values()) + steps
        grads = torch.autograd.grad(
            [y for y, _ in pairs], wanted, [d.to(y.dtype) for y, d in pairs], allow_unused=True
        )
    got = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    gates, rest = got[: len(parts)], got[len(parts) :]
    free, steps = rest[: len(values.free)], rest[len(values.free) :]
    listed = [use for p, d in zip(parts, gates, strict=True) for use in _of_gates(p, d)]
    T = len(found.lengths)
    for i, p in enumerate(projected):
        assert p.weights.hr is not None
        listed.append(Use(p.weights.hr, _rows(p.inner), _rows(steps[i * T : (i + 1) * T])))
    watched = [use for use in listed if call.nodes[use.leaf] is not None]
    return found, watched, dict(zip(values.free, free, strict=True))


def _of_gates(part: Part, delta: Tensor) -> Iterator[Use]:
    hidden = delta
    if part.factors:  # of a GRU
        r, z, n = delta.chunk(3, -1)
        hidden = torch.cat([r, z, n * _rows(part.factors)], -1)
    w = part.weights
    yield Use(w.ih, part.inputs.detach(), delta)
    yield Use(w.hh, _rows(part.before), hidden)
    if w.b_ih is not None:
        yield Use(w.b_ih, None, delta)
    if w.b_hh is not None:
        yield Use(w.b_hh, None, hidden)


def _rows(steps: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach() for x in steps])


def _in_rows(call: Call, deltas: Sequence[Tensor | None]) -> list[Tensor | None]:
    """δ of the output in rows, like the input; those of the states as they are."""
    first, *states = deltas
    if first is None or first.ndim == 2:
        return [first, *states]
    asked = options(lambda position, keyword: call.value(position, keyword))
    first = first.transpose(0, 1) if asked.batch_first else first
    return [first.reshape(-1, first.shape[-1]), *states]


class _Values:
    """The tensors of a call in one type, at least float32; ``free`` are the parametric ones among
    states and input, whose gradients are wanted too."""

    def __init__(self, call: Call, found: Recurrence) -> None:
        leaves = [i for w in found.weights for i in w if i is not None]
        tensors = [found.input, *(call.leaves[i] for i in leaves)]
        self._dtype = wide_type(reduce(torch.promote_types, (t.dtype for t in tensors)))
        self._call = call
        self.free: dict[int, Tensor] = {}
        self.rows = self._wanted(_input(call), found.rows)
        self.states = [self._wanted(i, call.leaves[i]) for i in found.states]

    def _wanted(self, leaf: int, x: Tensor) -> Tensor:
        x = x.detach().to(self._dtype)
        if self._call.nodes[leaf] is not None:
            x = self.free[leaf] = x.clone().requires_grad_()
        return x

    def of(self, leaf: int | None) -> Tensor | None:
        return None if leaf is None else self._call.leaves[leaf].detach().to(self._dtype)


def _input(call: Call) -> int:
    leaf = call.at(0, "data" if "data" in call.spec.keywords else "input")
    assert leaf is not None
    return leaf


def _run(found: Recurrence, values: _Values) -> tuple[list[Tensor], list[Part]]:
    """The outputs again: of the last layer in rows, and the last states."""
    parts: list[Part] = []
    x, last_h, last_c = values.rows, [], []
    cell = values.states[0].ndim == 2
    states = [s[None] if cell else s for s in values.states]
    for i in range(0, len(found.weights), found.directions):
        outs = []
        for k in range(i, i + found.directions):
            part, h, c = _direction(found, values, x, [s[k] for s in states], k)
            parts.append(part)
            outs.append(torch.cat(part.after))
            last_h.append(h)
            last_c.append(c)
        x = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    if cell:
        return [last_h[0], last_c[0]], parts
    return [x, torch.stack(last_h), torch.stack(last_c)], parts


def _direction(
    found: Recurrence, values: _Values, x: Tensor, start: Sequence[Tensor], k: int
) -> tuple[Part, Tensor, Tensor]:
    """One layer in one direction, and its last states. A sequence that has ended keeps its state;
    backwards, one that has not begun."""
    w, reverse = found.weights[k], k % found.directions == 1
    W_ih, W_hh = values.of(w.ih), values.of(w.hh)
    assert W_ih is not None and W_hh is not None
    b_hh, W_hr = values.of(w.b_hh), values.of(w.hr)
    gates = F.linear(x, W_ih, values.of(w.b_ih))
    gates = gates if gates.requires_grad else gates.requires_grad_()
    part, step = Part(w, x, gates), _STEPS[found.kind]
    h, c = start[0], start[-1]
    steps = list(enumerate(zip(gates.split(found.lengths), found.lengths, strict=True)))
    done: dict[int, tuple[Any, ...]] = {}
    for t, (z, n) in reversed(steps) if reverse else steps:
        h_old, c_old = h[:n], c[:n]
        new, cell, r = step(z, F.linear(h_old, W_hh, b_hh), h_old, c_old)
        inner = new
        if W_hr is not None:
            new = F.linear(new, W_hr)
        done[t] = h_old, inner, new, r
        h = new if n == len(h) else torch.cat([new, h[n:]])
        c = cell if n == len(c) else torch.cat([cell, c[n:]])
    for t in range(len(steps)):
        h_old, inner, new, r = done[t]
        part.before.append(h_old)
        part.inner.append(inner)
        part.after.append(new)
        if r is not None:
            part.factors.append(r)
    return part, h, c
