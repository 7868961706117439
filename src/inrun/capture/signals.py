"""Free signals: what a classification loss says about each example while it is computed.

A call of ``F.cross_entropy`` (``nll_loss``, ``binary_cross_entropy_with_logits``) has the logits
and the labels, and the provenance knows whose its rows are. For each row:

    loss     −log p_y, of the label alone: without class weights and label smoothing
    el2n     ‖p − onehot(y)‖, the norm of the loss's gradient at the logits
    margin   z_y − max_{j≠y} z_j; below 0 the model predicts another label
    label    y

A row counts where a gradient arrives at its loss in the backward pass and its label is not
``ignore_index``. An example's signals are means over its rows (tokens, several heads); its label is
known where it has one row. What is not known is NaN: other losses, rows that no example owns alone,
a loss inside a compiled graph or fused with its head. With more than ``MANY`` classes only the loss
is read.

The mode sees the call (mode.py). Where it stands aside inside the model's forward pass (aside.py),
log-probabilities and labels are read from the loss's node in the autograd graph, which holds them
for the backward pass: its place in the graph is part of the plan. A pass with a loss that cannot be
read there (label smoothing, soft labels, half precision) is left to the mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.capture.later import Deferred, Later, Several, Together, rows_of
from inrun.capture.micro_batch import MicroBatch
from inrun.tensors.autocast import no_autocast
from inrun.tensors.layout import Layout, to_rows
from inrun.tensors.owners import Owners, on_one_device
from inrun.torch_compat import DisableTorchFunction, saved_tensors_hooks

MANY = 2048  # classes: beyond, EL2N and margin (several passes over the logits) are left out
TOGETHER = 2**24  # logits that are worked on at a time
UNNORMALISED = 1e-2  # |log Σp| from which the input of nll_loss is no log-probability
FEW, SOME = 2**14, 2**22  # logits on a CPU that wait for others; that NumPy works on
HALF, WIDE = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)


class Labelled(NamedTuple):
    """The arguments of a loss: logits (or log-probabilities), labels, and the dimension of the
    classes in the logits (None: every number is a binary logit of its own)."""

    logits: Tensor
    labels: Tensor
    classes: int | None
    ignore: int = -100
    logarithms: bool = False  # the logits are log-probabilities ...
    normalised: bool = False  # ... certainly


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Labelled:  # fmt: skip
    return Labelled(input, target, min(1, input.ndim - 1), ignore_index)


def _nll_loss(
    input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
) -> Labelled:  # fmt: skip
    return Labelled(input, target, min(1, input.ndim - 1), ignore_index, logarithms=True)


def _binary(input: Tensor, target: Tensor, *_: Any, **__: Any) -> Labelled:
    return Labelled(input, target, None)


LOSSES = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.binary_cross_entropy_with_logits: _binary,
}


CROSS = F.cross_entropy


def watch_loss(
    micro: MicroBatch, find: Callable[[Tensor], Any], note: Callable[[Any, Any], None],
    together: Together, func: Any, args: Any, kwargs: Any, out: Any,
) -> None:  # fmt: skip
    """A loss has just been computed under the mode: note its signals, which count when a gradient
    arrives at ``out``. ``find`` knows origins; ``note`` gets the loss's node and the origin of its
    logits, None for one that cannot be read from its node. Small ones go ``together``."""
    if not isinstance(out, Tensor) or not out.requires_grad:
        return
    given = LOSSES[func](*args, **kwargs)
    if not isinstance(given.logits, Tensor) or not isinstance(given.labels, Tensor):
        return
    origin = find(given.logits)
    whose = _whose(micro, origin, given)
    if whose is None:
        return
    node = out.grad_fn
    loss = None if saved_tensors_hooks() else of_node(node, given if func is CROSS else None)
    if loss is not None and loss.logits.shape != given.logits.shape:
        loss = None
    note(node, origin if loss is not None and type(origin) is Layout else None)
    out.register_hook(partial(_arrived, micro, _rows_later(loss or given, together), whose))


def read_node(micro: MicroBatch, together: Together, node: Any, origin: Layout) -> None:
    """The same of a loss that the mode has not seen: a node of a plan, and the origin of its
    logits when the mode saw it."""
    loss = of_node(node)
    whose = None if loss is None else _whose(micro, origin, loss)
    if loss is not None and whose is not None:
        rows = _rows_later(loss, together)
        node.register_prehook(lambda grads: _arrived(micro, rows, whose, grads[0]))


def of_node(node: Any, call: Labelled | None = None) -> Labelled | None:
    """What a loss's node in the autograd graph holds; None if that is another loss, or rounded.
    ``call``: arguments of the ``cross_entropy`` that made it."""
    name = "" if node is None else node.name()
    if call is not None and name == "NllLossBackward0":  # fewer questions
        z = node._saved_self
        found = Labelled(z, call.labels, call.classes, call.ignore, True, True)
        return None if z.dtype in HALF else found
    if name == "BinaryCrossEntropyWithLogitsBackward0":
        found = Labelled(node._saved_self, node._saved_target, None)
    elif name in ("NllLossBackward0", "NllLoss2DBackward0"):
        z = node._saved_self
        c, (behind, _) = min(1, z.ndim - 1), node.next_functions[0]
        sure = behind is not None and behind.name() == "LogSoftmaxBackward0"
        sure = sure and _signed(behind._saved_dim) % z.ndim == c
        ignore = _signed(node._saved_ignore_index)
        found = Labelled(z, node._saved_target, c, ignore, logarithms=True, normalised=sure)
    else:
        return None
    return None if found.logits.dtype in HALF else found


def _signed(x: int) -> int:
    """Nodes show an integer below 0 as one without a sign."""
    return x - 2**64 if x >= 2**63 else x


def _rows_later(loss: Labelled, together: Together) -> Deferred | Tensor:
    """The signals of the rows; the loss itself, if it is a small one."""
    if on_host(loss, FEW):
        return Deferred(loss.logits, loss.labels, loss.ignore, together)
    return computed(loss)


def computed(loss: Labelled) -> Tensor:
    """The signals of the rows."""
    if on_host(loss, SOME) and loss.logits.shape[1] <= MANY:
        return torch.from_numpy(rows_of(loss.logits, loss.labels, loss.ignore))
    with torch.no_grad(), DisableTorchFunction(), no_autocast(loss.logits.device.type):
        return row_signals(loss)


def _whose(micro: MicroBatch, origin: Any, loss: Labelled) -> Layout | Tensor | None:
    """Whose the rows of a loss are: a layout of them, or the example of each; None: not known."""
    z, c = loss.logits, loss.classes
    if z.is_complex():
        return None
    if isinstance(origin, Layout) and not origin.data and origin.dim != c:
        if micro.owner is None and micro.slots is None:
            moved = origin.dim - (c is not None and origin.dim > c)
            known = moved == origin.dim
            return origin if known else Layout(moved, origin.outer, origin.inner)
        rows = z.shape[origin.dim] // (origin.outer * origin.inner)
        own = torch.arange(rows, device="cpu").repeat_interleave(origin.inner)
        entries = own.repeat(origin.outer).view(
            [len(own) * origin.outer if d == origin.dim else 1 for d in range(z.ndim)]
        )
    elif isinstance(origin, Owners) and not origin.data:
        entries = origin.map
    else:
        return None
    if c is not None and entries.shape[c] != 1:
        return None
    shape = [n for d, n in enumerate(z.shape) if d != c]
    flat = (entries if c is None else entries.select(c, 0)).expand(shape).flatten()
    inner = micro.slots if micro.slots is not None else micro.owner
    if inner is not None:
        inner, flat = on_one_device(inner, flat)
        flat = torch.where(flat < 0, flat, inner[flat.clamp(min=0)])
    return torch.where(flat < 0, micro.B, flat).to(z.device, non_blocking=True)


def row_signals(loss: Labelled) -> Tensor:
    """[5, *rows]: log p_y, EL2N, the highest log-probability of another label, y, and 1 where the
    label counts (0 in all five otherwise). NaN: not known. ``means`` makes the signals of them."""
    z, y, c = loss.logits.detach(), loss.labels.detach(), loss.classes
    if c is None:
        z = z.float() if z.dtype in HALF else z
        return _binary_rows(z, y.to(z.dtype))
    hard = not y.is_floating_point()
    piece = _rows if hard else _soft_rows
    if hard and z.ndim == 2 and z.numel() <= TOGETHER:
        return piece(z, y, loss)
    z = z.movedim(c, -1)  # [*rows, C]
    y = y if hard else y.movedim(c, -1)
    rows, C = z.shape[:-1], z.shape[-1]
    z, y = z.reshape(-1, C), y.reshape(-1) if hard else y.reshape(-1, C)
    some = max(1, TOGETHER // C)
    parts = [piece(z[i : i + some], y[i : i + some], loss) for i in range(0, len(z), some)]
    return torch.cat([z.new_zeros(5, 0), *parts], 1).view(5, *rows)


def _rows(z: Tensor, y: Tensor, loss: Labelled) -> Tensor:
    """Logits [N, C] and labels [N] → [5, N]."""
    z = z.float() if z.dtype in HALF else z
    ignored = y == loss.ignore
    at = y.masked_fill(ignored, 0)[:, None]
    found, many = z.new_ones(5, len(z)), not 1 < z.shape[1] <= MANY
    found[3] = y
    logp = z if loss.logarithms else z.log_softmax(1)
    own = logp.gather(1, at)  # [N, 1]: log p_y
    found[0] = own[:, 0]
    if many:
        found[1:3] = math.nan
    else:
        torch.linalg.vector_norm(logp.exp().scatter_(1, at, own.expm1()), dim=1, out=found[1])
        torch.amax(logp.scatter(1, at, -math.inf), 1, out=found[2])
    if loss.logarithms and not loss.normalised:
        off = z.logsumexp(1).abs()
        found[:3].masked_fill_(~(off < UNNORMALISED), math.nan)
    return found.masked_fill_(ignored, 0)


def on_host(loss: Labelled, most: int) -> bool:
    """Are these log-probabilities on a CPU, no more than so many (later.py)?"""
    z, y = loss.logits, loss.labels
    return (
        loss.normalised and z.ndim == 2 and z.is_cpu and z.numel() <= most and z.shape[1] > 1
        and type(z) is type(y) is Tensor and z.dtype in WIDE and y.dtype == torch.int64 and y.is_cpu
    )  # fmt: skip


def _soft_rows(z: Tensor, t: Tensor, loss: Labelled) -> Tensor:
    """The same for labels that are probabilities [N, C]: they have no margin."""
    z = z.float() if z.dtype in HALF else z
    logp = z if loss.logarithms else z.log_softmax(1)
    p = logp.exp()
    normal = ((p.sum(1) - 1).abs() < UNNORMALISED) & (t >= 0).all(1)
    own = torch.where(t == 0, 0.0, t * logp).sum(1)
    found = torch.stack([own, (p - t).norm(dim=1)])
    unknown = torch.full_like(found, math.nan)
    found = torch.where(normal, found, math.nan)
    return torch.cat([found, unknown, torch.ones_like(own)[None]])


def _binary_rows(z: Tensor, t: Tensor) -> Tensor:
    """Binary logits and targets in [0, 1], each a row of its own."""
    t = t.expand(z.shape)
    own = t * z - F.softplus(z)
    hard = (t == 0) | (t == 1)
    other = torch.where(hard, own - z * (2 * t - 1), math.nan)
    found = torch.stack([own, (z.sigmoid() - t).abs(), other, t, torch.ones_like(z)])
    found[:2] = torch.where((t >= 0) & (t <= 1), found[:2], math.nan)
    return found


def _arrived(
    micro: MicroBatch, rows: Deferred | Tensor, whose: Layout | Tensor, g: Tensor | None
) -> None:
    """The gradient of a loss: the rows where it is not 0 are part of the training."""
    if g is None:
        return
    with DisableTorchFunction():  # g: one number, or one for each row
        whole = g.ndim == 0 and g.is_cpu and g.item() != 0
        alone = whole and micro.signals is None and isinstance(whose, Layout)
        if alone and isinstance(rows, Deferred) and rows.B == micro.B:
            rows.own()
            micro.signals = rows
            return
    with torch.no_grad(), DisableTorchFunction():
        rows = rows.rows() if isinstance(rows, Deferred) else rows
        had = micro.signals.rows() if isinstance(micro.signals, Deferred) else micro.signals
        if whole and isinstance(whose, Layout) and rows.ndim == 2 and whose.outer == 1:
            sums = rows if rows.shape[1] == micro.B else rows.view(5, micro.B, -1).sum(2)
        else:
            sums = _sums(micro, rows, whose, g)
        micro.signals = sums if had is None else had + sums.to(had)


def _sums(micro: MicroBatch, rows: Tensor, whose: Layout | Tensor, g: Tensor) -> Tensor:
    """[5, B]: sums over the rows of each example that have a gradient, one number or one for each
    row."""
    g = g.detach()
    kept = torch.where(g.reshape(rows.shape[1:] if g.ndim else ()) != 0, rows, 0)
    if isinstance(whose, Tensor):
        return kept.new_zeros(5, micro.B + 1).index_add_(1, whose, kept.flatten(1))[:, :-1]
    behind = Layout(whose.dim + 1, whose.outer, whose.inner)
    return to_rows(kept, behind, micro.B).flatten(2).sum(2).T  # [B, 5, …]


def predictions(micro: MicroBatch) -> Tensor | None:
    """Of how many rows the loss of each example is made [B], at least 1; None: of one, or not
    known."""
    if not isinstance(micro.signals, Tensor):
        return None
    return micro.signals[4].clamp(min=1)


def of_examples(micros: Sequence[MicroBatch]) -> Tensor | Later | None:
    """The signals of the examples of a step, later; or [5, B]: sums over the rows of each that
    count, and how many these are; None without any."""
    small = [m.signals for m in micros if isinstance(m.signals, Deferred)]
    if small and len(small) == len(micros):
        for kept in small:
            kept.wait()
        return small[0] if len(small) == 1 else Several(small)
    parts = [m.signals.rows() if isinstance(m.signals, Deferred) else m.signals for m in micros]
    known = [s for s in parts if s is not None]
    if len(micros) <= 1 or not known:
        return known[0] if known else None
    like = known[0]
    unknown = (like.new_zeros(5, m.B) for m in micros)
    sums = [u if s is None else s.to(like) for s, u in zip(parts, unknown, strict=True)]
    return torch.cat(sums, 1)
