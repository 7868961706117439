"""Operations that are read from the autograd graph once a forward pass is over.

What a remembered use needs (gradients/use.py) autograd keeps as well: until the backward pass the
node of an operation holds its inputs. Where a plan is followed (aside.py), such an operation runs
as if nobody looked:

1. in the passes from which the plan is made, ``Readings.how`` finds out under which names its node
   keeps the inputs;
2. when a pass is over and its graph was found to be the plan's, ``Readings.read`` takes the inputs
   from the node, and leaves a list there to which the backward pass appends δ;
3. when the batch is over, ``Readings.collect`` hands inputs and δ to the keeper.

In the backward pass nothing of this runs in Python but ``list.append``, once for each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from inrun.capture.micro_batch import Keeper, MicroBatch
from inrun.capture.site import Site, kept_by
from inrun.capture.tap import refuse_again
from inrun.errors import overwritten
from inrun.gradients import Call
from inrun.gradients.blocks import Blocks
from inrun.gradients.owned import Positions
from inrun.gradients.use import Use, by_rows
from inrun.tensors.autocast import Autocast, current
from inrun.torch_compat import DisableTorchFunction, parameters_of, version_of

if TYPE_CHECKING:
    from inrun.capture.plan import Step

SHAPES = ("ViewBackward0", "UnsafeViewBackward0")  # the same numbers in another shape
_CASTS = ("ToCopyBackward0", *SHAPES)


class OtherPlanError(Exception):
    """The autograd graph is another than planned, or a node of it does not say what it does."""


Option = tuple[dict[str, Any], str, float]  # an attribute of a module and its value
_NORMS: dict[str, tuple[type[nn.Module], int]] = {  # their modules, and where eps is in a call
    "layer_norm": (nn.LayerNorm, 4), "group_norm": (nn.GroupNorm, 4), "rms_norm": (nn.RMSNorm, 3)
}  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """An input of an operation: its place among the leaves, and the attribute of the node that
    holds it."""

    leaf: int
    name: str
    held: torch.Size  # the shape in which the node has it,
    shape: torch.Size  # and that of the leaf
    dtype: torch.dtype
    version: int

    def read(self, node: Any) -> Tensor:
        """The tensor; raises OtherPlanError if it is another or was written to."""
        try:
            x: Tensor = getattr(node, self.name)
        except RuntimeError as error:  # autograd's own, which the backward pass will raise again
            raise OtherPlanError from error
        if x.shape != self.held or x.dtype is not self.dtype or version_of(x) != self.version:
            raise OtherPlanError
        return x if self.held == self.shape else x.reshape(self.shape)


@dataclass(frozen=True)
class Reads:
    """How an operation is read from its node."""

    output: int  # of the node
    kept: tuple[Kept, ...]
    autocast: Autocast
    device: torch.device
    bytes: int  # of what is kept and of δ
    by_rows: bool  # as in ``Use``, where rows are examples
    option: Option | None = field(default=None, compare=False)  # what the node does not say

    @cached_property
    def versions(self) -> list[int]:
        """How often each of the inputs was written to, as ``Kept.read`` finds them."""
        return [own.version for own in self.kept]


def _name_of(x: Tensor, node: Any) -> str | None:
    """The attribute under which a node keeps this input: the tensor itself, or what autocast made
    of it."""
    kept = {k: t for k in dir(node) if k.startswith("_saved_") and
            isinstance(t := getattr(node, k), Tensor) and t.numel() == x.numel()}  # fmt: skip
    same = [k for k, t in kept.items()
            if t.data_ptr() == x.data_ptr() and t.dtype == x.dtype and _as_one(t, x)]  # fmt: skip
    if (
        not same
        and x.grad_fn is not None
        and any(x.grad_fn in _before_casts(e) for e in _edges(node))
    ):
        cast = (k for k, t in kept.items() if t.dtype != x.dtype and _as_one(t, x))
        same = [k for k in cast if kept[k].shape[-1:] == x.shape[-1:]]
    return same[0] if len(same) == 1 else None


def _as_one(kept: Tensor, x: Tensor) -> bool:
    """Are the numbers of both in the same order?"""
    return kept.shape == x.shape or (kept.is_contiguous() and x.is_contiguous())


def _edges(node: Any) -> list[Any]:
    return [behind for behind, _ in node.next_functions if behind is not None]


def _before_casts(node: Any) -> list[Any]:
    """The node and those behind it, as long as they change type or shape alone."""
    found = [node]
    while found[-1].name() in _CASTS and (behind := _edges(found[-1])):
        found.append(behind[0])
    return found


def option_of(call: Call, modules: Sequence[nn.Module]) -> Option | None:
    """Where the factor of a call is that does not show in its node: eps of a normalisation, in the
    module whose forward pass makes the call. None: there is none. Raises OtherPlanError where it
    is not known where."""
    if call.name not in _NORMS:
        if any(isinstance(x, float) for x in call.leaves):
            raise OtherPlanError
        return None
    (kind, at), weight = _NORMS[call.name], call.at(2, "weight")
    eps = call.value(at, "eps", 1e-5)
    own = None if weight is None else call.leaves[weight]
    owners = [m for m in modules if own is not None and parameters_of(m).get("weight") is own]
    if len(owners) != 1 or type(owners[0]).forward is not kind.forward:
        raise OtherPlanError
    space = vars(owners[0])
    if "forward" in space or space.get("eps") != eps:
        raise OtherPlanError
    return space, "eps", eps


class Reading:
    """One operation of a pass, with what the backward pass leaves at its node."""

    __slots__ = ("deltas", "inputs", "kept", "loose", "step")

    def __init__(
        self, step: Step, inputs: list[Tensor], loose: list[int], kept: tuple[Tensor, ...]
    ) -> None:
        self.step, self.inputs, self.kept = step, inputs, kept
        self.loose = loose  # inputs that the loop may write to
        self.deltas: list[Any] = []

    def uses(self, micro: MicroBatch, blocks: Blocks | None) -> Iterator[Use]:
        """What is to be remembered of the operation."""
        site, reads = self.step.site, self.step.reads
        assert site is not None and reads is not None and site.linear is not None
        assert site.origin is not None
        for given in self.deltas:
            delta = given[reads.output]
            if delta is None:
                continue
            call, inputs, versions = site.call, self.inputs, reads.versions
            positions = micro.positions(site.origin, call.B, reads.device)
            if self.loose:
                inputs, versions = self._copied(versions)
            if delta.shape != call.shape:
                delta = delta.reshape(call.shape)
            make = partial(self._call, inputs, blocks, positions)
            rows = reads.by_rows and positions is None
            yield Use(make, site.linear, call.B, inputs, delta, versions, site.records, rows)

    def _copied(self, versions: list[int]) -> tuple[list[Tensor], list[int]]:
        """The inputs, copies of the loose ones among them. Refuses those written to meanwhile."""
        if list(map(version_of, self.inputs)) != versions:
            raise overwritten(self._call(self.inputs, None, None))
        inputs = [x.clone() if k in self.loose else x for k, x in enumerate(self.inputs)]
        return inputs, list(map(version_of, inputs))

    def _call(
        self, inputs: Sequence[Tensor], blocks: Blocks | None, positions: Positions | None
    ) -> Call:
        """The call with its leaves; those that are no tensors are always the same."""
        site, reads = self.step.site, self.step.reads
        assert site is not None and reads is not None
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in self.step.leaves]
        for own, x in zip(reads.kept, inputs, strict=True):
            leaves[own.leaf] = x
        return site.call.with_(
            leaves=leaves, autocast=reads.autocast, kept=self.kept, blocks=blocks,
            positions=positions,
        )  # fmt: skip


class Readings:
    """The operations of a batch that were read from the graph."""

    def __init__(self, keeper: Keeper, blocks: Blocks | None, modules: Sequence[nn.Module]) -> None:
        self.keeper, self.blocks, self.modules = keeper, blocks, modules
        self._found: list[Reading] = []

    def how(self, site: Site, leaves: Sequence[Any], out: Tensor) -> tuple[Any, Reads | None]:
        """The node of an operation that has just run, and how to read it; None if that is not
        possible."""
        linear, call, no = site.linear, site.call, (None, None)
        if linear is None or site.fused is not None or site.writes:
            return no
        if self.keeper.offload:  # to be handed over at once
            return no
        if site.origin is None or out.shape != call.shape or call.spec.nested is not None:
            return no
        if any(call.nodes[i] is None for i in linear.leaves):  # a frozen bias is not kept
            return no
        node, output = out.grad_fn, out.output_nr
        while node is not None and node.name() in SHAPES:
            node, output = node.next_functions[0]
        if node is None or isinstance(node, BackwardCFunction):  # a tap
            return no
        found, size = list[Kept](), out.nbytes
        for i in linear.others:
            name = _name_of(leaves[i], node)
            if name is None:
                return no
            x = getattr(node, name)
            found.append(Kept(i, name, x.shape, leaves[i].shape, x.dtype, version_of(x)))
            size += x.nbytes
        try:
            option = option_of(call.with_(leaves=leaves), self.modules)
        except OtherPlanError:
            return no
        autocast = current(out.device.type)
        rows = by_rows(call.with_(positions=None))
        return node, Reads(output, tuple(found), autocast, out.device, size, rows, option)

    def read(self, step: Step, node: Any) -> None:
        """Read an operation, and have its δ left at the node."""
        site, reads = step.site, step.reads
        assert site is not None and reads is not None
        inputs, loose = list[Tensor](), list[int]()
        for k, own in enumerate(reads.kept):
            x = own.read(node)
            if x.requires_grad:
                x = x.detach()
            else:
                loose.append(k)
            inputs.append(x)
        on_host = self.blocks is not None and reads.autocast[0] == "cpu"
        found = Reading(step, inputs, loose, kept_by(node, site.kept) if on_host else ())
        node.register_prehook(found.deltas.append)
        self._found.append(found)

    def begin_with(self, nodes: Iterable[Any], micro: MicroBatch) -> None:
        """The backward pass begins at one of these nodes: all gradients pass one of them."""
        if self._found:
            first, last = self._found[0].step.site, self._found[-1].step.reads
            assert first is not None and last is not None
            micro.met, micro.autocast = True, last.autocast
            hook = _Begins(first.call, partial(self.keeper.first_gradient, micro))
            for node in dict.fromkeys(nodes):
                node.register_prehook(hook)

    def collect(self, micro: MicroBatch) -> None:
        """The batch is over: remember inputs and δ. In the order of a backward pass, before those
        of the stem, so that sums are the same to the bit whether operations were read or not."""
        before, micro.uses, size = micro.uses, [], 0
        with torch.no_grad(), DisableTorchFunction():
            for reading in reversed(self._found):
                reads = reading.step.reads
                assert reads is not None
                blocks = self.blocks if reads.autocast[0] == "cpu" else None
                for use in reading.uses(micro, blocks):
                    micro.remember(use)
                    size += reads.bytes
        micro.uses += before
        self.forget()
        if size:
            self.keeper.check_memory(size)

    def forget(self) -> None:
        for reading in self._found:  # the nodes may outlive the batch
            reading.deltas.clear()
        self._found.clear()


class _Begins:
    def __init__(self, call: Any, begun: Callable[[], None]) -> None:
        self.call, self.begun = call, begun

    def __call__(self, deltas: Sequence[Tensor | None]) -> None:
        refuse_again(self.call, *[d for d in deltas if d is not None])
        self.begun()
