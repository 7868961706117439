"""Per-example gradients without the capture: every row of a batch goes through a copy of the model
of its own, alone.

``run.check()`` compares with these. The calls of the model inside ``run.batch`` are kept, with
the gradient δ that the user's loss sent back to their outputs. A copy of the model then computes
row k of the inputs alone; its outputs, contracted with row k of δ, give g_k. That the rows' outputs
are those of the whole batch, and that the g_k add up to ``.grad``, is measured, not assumed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inrun.capture.capture import Capture
from inrun.capture.inputs import named_tensors
from inrun.capture.micro_batch import MicroBatch
from inrun.exact import reference
from inrun.exact.check import Check, gradient_errors, per_example
from inrun.tensors.autocast import as_it_was
from inrun.torch_compat import DisableTorchFunction, tree_map, uncompiled


class UnrepeatableError(Exception):
    """Why the rows could not be computed one by one."""


@dataclass
class ModelCall:
    """One call of the model: its inputs, its outputs, and the gradients that came back."""

    args: Any
    kwargs: Any
    outputs: dict[str, Tensor]
    deltas: dict[str, Tensor] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)  # in the graph, until they are read
    modes: list[bool] = field(default_factory=list)  # training or evaluating, of all modules
    random: bool = False


class ModelCalls:
    """The calls of the model inside one ``run.batch``."""

    def __init__(self, model: nn.Module, batch_dim: int) -> None:
        self.model, self.batch_dim, self.calls = model, batch_dim, list[ModelCall]()
        self._inner = uncompiled(model)
        self._given: list[tuple[Any, Any, list[Tensor]]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        before = self.model.register_forward_pre_hook(self._enter, with_kwargs=True)
        after = self.model.register_forward_hook(self._leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            with DisableTorchFunction():
                given = tree_map(_copied, (args, dict(kwargs)))
            self._given.append((*given, _random_states()))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling() or not self._given:
            return
        args, kwargs, state = self._given.pop()
        outputs = {k: t for k, t in named_tensors(out, "output") if t.requires_grad}
        call = ModelCall(args, kwargs, {k: t.detach().clone() for k, t in outputs.items()})
        call.random = any(
            not torch.equal(a, b) for a, b in zip(state, _random_states(), strict=True)
        )
        call.nodes = {k: t.grad_fn for k, t in outputs.items()}
        call.modes = [m.training for m in self._inner.modules()]
        for k, t in outputs.items():
            t.register_hook(lambda g, k=k: call.deltas.__setitem__(k, g.detach().clone()))
        self.calls.append(call)

    def settle(self) -> None:
        """Of outputs that are computed from one another keep only the last; of logits and the loss
        made of them, keep the logits."""
        for call in self.calls:
            rows = [k for k in call.deltas if call.outputs[k].ndim] or list(call.deltas)
            nodes = {k: call.nodes[k] for k in rows}
            last = [
                k
                for k, n in nodes.items()
                if not any(n is not m and _leads_to(m, n) for m in nodes.values())
            ]
            call.deltas = {k: call.deltas[k] for k in last}
            call.nodes = {}


def _copied(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _leads_to(node: Any, other: Any) -> bool:
    """Does the graph of ``node`` lead to ``other``?"""
    seen, left = set(), [node]
    while left:
        n = left.pop()
        if n is None or n in seen:
            continue
        if n is other:
            return True
        seen.add(n)
        left += [m for m, _ in n.next_functions]
    return False


def verified_rows(
    check: Check, model: nn.Module, params: Mapping[str, Tensor], micros: Sequence[MicroBatch],
    captured: dict[str, Tensor], G: Mapping[str, Tensor], rounding: float,
) -> dict[str, Tensor]:  # fmt: skip
    """The per-example gradients to compare with: each row's own where these can be had. ``G`` is
    .grad without what belongs to nobody.

    Notes in the check how far the captured ones are from them, or why that is not known.
    """
    calls, check.calls, check.rounding = check.calls, [], rounding
    try:
        found = rows_alone(model, params, calls, micros, captured)
        off = max(gradient_errors(G, found.rows).values()) if found.rows is not None else 0.0
        if not off <= rounding:
            raise UnrepeatableError(
                f"the rows' gradients, each alone, do not add up to .grad (off by {off:.1e}): the "
                "loss depends on parameters in another way than through what the model returned"
            )
    except Exception as e:
        check.unverified = str(e).splitlines()[0] if str(e) else type(e).__name__
        return captured
    check.credit_error = found.error
    return captured if found.rows is None else found.rows


@dataclass
class Independent:
    """The gradients that each row has alone.

    ``rows``: per-example gradients [B, *W] of the step by parameter; None where it draws random
    numbers. ``error``: how far the captured ones are from these, relative to their size.
    """

    rows: dict[str, Tensor] | None
    error: float


def rows_alone(
    model: nn.Module, params: Mapping[str, Tensor], batches: Sequence[ModelCalls],
    micros: Sequence[MicroBatch], captured: Mapping[str, Tensor],
) -> Independent:  # fmt: skip
    """Per-example gradients of a step without the capture.

    Where the forward pass draws random numbers (dropout), a row alone draws others than in the
    batch. Then a copy of the model repeats the batch in evaluation mode, under a capture of its
    own, and is compared with its rows.
    """
    model = uncompiled(model)
    names = {id(p): k for k, p in params.items()}
    named = {n: names[id(p)] for n, p in model.named_parameters() if id(p) in names}
    total, start = sum(m.B for m in micros), 0
    rows = {k: p.new_zeros((total, *p.shape)) for k, p in params.items()}
    other = {k: torch.zeros_like(r) for k, r in rows.items()}
    random = any(call.random for batch in batches for call in batch.calls)
    for batch, micro in zip(batches, micros, strict=True):
        if not batch.calls:
            raise UnrepeatableError("the model itself was not called inside run.batch")
        if micro.owner is not None or (micro.slots is not None and micro.order is None):
            raise UnrepeatableError("examples without a row of their own cannot be run alone")
        batch.settle()
        here = slice(start, start + micro.B)
        for call in batch.calls:
            twin = copy.deepcopy(model)
            for module, training in zip(twin.modules(), call.modes, strict=True):
                module.training = training and not random
            dim = batch.batch_dim
            _add(rows, here, named, _alone(twin, call, micro, dim, not random))
            if random:
                _add(other, here, named, _captured_again(twin, call, micro, named, dim))
        start += micro.B
    if random:
        return Independent(None, _difference(other, rows))
    return Independent(rows, _difference(captured, rows))


def _add(
    total: dict[str, Tensor], here: slice, named: Mapping[str, str], rows: Mapping[str, Tensor]
) -> None:
    for n, g in rows.items():
        if n in named:
            total[named[n]][here] += g.to(total[named[n]])


def _difference(found: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> float:
    """The largest difference of one example's gradient, relative to the largest example's."""
    size = _norms(rows).max()
    none = {k: torch.zeros_like(r) for k, r in rows.items() if k not in found}
    off = _norms({k: {**found, **none}[k].to(r) - r for k, r in rows.items()}).max()
    return float(off / size) if size > 0 else float(off > 0)


def _norms(rows: Mapping[str, Tensor]) -> Tensor:
    squares = [r.double().reshape(len(r), -1).square().sum(1) for r in rows.values()]
    return torch.stack(squares).sum(0).sqrt()


def _alone(
    twin: nn.Module, call: ModelCall, micro: MicroBatch, batch_dim: int, compare: bool
) -> dict[str, Tensor]:
    """Each row through its own copy; only BatchNorm sees the others."""
    B = micro.B

    def forward(model: nn.Module, given: Any) -> Tensor:
        args, kwargs = given
        with as_it_was(micro.autocast):
            out = _outputs(model(*args, **kwargs), call)
        flat = torch.cat([t.flatten() for t in out.values()])
        return flat.view(*[1] * batch_dim, 1, -1)

    def loss(rows: Tensor, batch: Any) -> Tensor:
        rows, whole = rows.reshape(B, -1), _by_row(call.outputs, call, B, batch_dim)
        if rows.shape != whole.shape:
            raise UnrepeatableError("a row alone has outputs of another shape")
        scalars = [i for i, k in enumerate(call.deltas) if call.outputs[k].ndim == 0]
        if compare and not scalars:
            _compare(rows, whole)
        elif compare:
            _compare(rows.mean(0), whole[0])
        delta = _by_row(call.deltas, call, B, batch_dim)
        return (rows * (delta / B if scalars else delta)).sum()

    with torch.enable_grad():
        return reference.per_example_gradients(
            twin, (call.args, call.kwargs), B, forward, loss, batch_dim
        )


def _compare(rows: Tensor, whole: Tensor) -> None:
    rounding = {torch.float64: 1e-9, torch.float32: 1e-3}.get(rows.dtype, 0.05)
    off, size = float((rows.detach() - whole).norm()), float(whole.norm())
    if not off <= rounding * size:
        raise UnrepeatableError(
            "a row alone has other outputs than in the batch, so its examples act on each other "
            f"inside the model or change places in it (off by {off / (size + 1e-300):.1e})"
        )


def _by_row(tensors: Mapping[str, Tensor], call: ModelCall, B: int, batch_dim: int) -> Tensor:
    """Returns outputs of the model, or their gradients, as [B, …]."""
    found = []
    for t in (tensors[k] for k in call.deltas):
        if t.ndim == 0:
            found.append(t.expand(B, 1))
        elif t.ndim > batch_dim and t.shape[batch_dim] == B:
            found.append(t.movedim(batch_dim, 0).reshape(B, -1))
        else:
            raise UnrepeatableError(
                f"the model returns a tensor of shape {tuple(t.shape)}: no row for each example"
            )
    return torch.cat(found, 1)


def _outputs(out: Any, call: ModelCall) -> dict[str, Tensor]:
    if not call.deltas:
        raise UnrepeatableError("no gradient came back to what the model returned")
    found = dict(named_tensors(out, "output"))
    return {k: found[k] for k in call.deltas}


def _captured_again(
    twin: nn.Module, call: ModelCall, micro: MicroBatch, named: Mapping[str, str],
    batch_dim: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Run the same batch under a capture; returns the gradients that it gives each row."""
    watched = {n: p for n, p in twin.named_parameters() if n in named and p.requires_grad}
    capture = Capture(twin, watched, batch_dim=batch_dim)
    with torch.enable_grad(), as_it_was(micro.autocast), capture.batch(micro.B) as again:
        out = _outputs(twin(*call.args, **call.kwargs), call)
        torch.stack([(t * call.deltas[k]).sum() for k, t in out.items()]).sum().backward()
    capture.close()
    return per_example(watched, [again])
