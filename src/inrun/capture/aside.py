"""Look at a forward pass a few times, then stand aside.

The mode (mode.py) sees every call of a torch function in Python, though few of them involve a
parameter. After some steps the places where parameters meet examples are known: a *plan*. From then
on the mode is taken off for most of the model's forward pass. Operations whose δ is remembered are
read from the autograd graph when the pass is over (reading.py); the parameters of others get a
class of their own meanwhile, which hands us their calls. All else runs as if nobody looked.

What makes this right:

* A plan belongs to a signature: shapes, types and origins of the model's inputs, the modules'
  training flags, autocast. It is followed after it was found equal in a few passes running.
* The *stem*, up to the last call that the memo could not answer or whose batched operand has no
  autograd graph, runs under the mode in every pass. So what enters the rest is known.
* In the rest, the autograd graph, from what the model returns back to the stem, must be that of the
  plan: kinds of nodes, edges, parameters, and the numbers that say how each moves what it gets
  (sizes, dimensions, shifts); and so must the calls of parameters that reach us. The gradient of a
  row goes where the graph leads, so it goes where it went before. What comes after the last tap
  decides δ, not whose it is.
* Custom autograd functions, writes into slices, recomputation and whatever depends on the content
  of a tensor (the memo does not answer such calls) are never part of a plan.
* Numbers without a gradient leave no trace in the graph. What a model newly does with them is seen
  when the mode looks again, now and then.

A pass that differs from its plan is not disturbed. Its step is void, and the signature is left to
the mode from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inrun.capture.graph import NUMBERS, Graph
from inrun.capture.inputs import named_tensors
from inrun.capture.micro_batch import MicroBatch
from inrun.capture.mode import PASSED_ON, dressed
from inrun.capture.plan import Called, Met, Pass, Plan, Start, Step, open_leaves
from inrun.capture.provenance import Origin
from inrun.capture.reading import OtherPlanError, Readings
from inrun.capture.site import Site
from inrun.tensors.autocast import current
from inrun.tensors.layout import tensors_in
from inrun.torch_compat import (
    functorch_transforms_active,
    get_eval_frame_callback,
    saved_tensors_hooks,
    top_mode,
    version_of,
)

if TYPE_CHECKING:
    from inrun.capture.intercept import Interceptor

CHANGED = "the model's forward pass was another than in the steps before"
_PASSES = 3  # equal ones, before a plan is followed
_CHANGES = 8  # passes of one signature that were not like the one before, until it is left alone
_SIGNATURES = 64
_AGAIN = 64  # passes after which the mode looks again
_training = attrgetter("training")


class Aside:
    """Learns plans and follows them. One for each capture."""

    def __init__(self, interceptor: Interceptor) -> None:
        self.provenance, self.memo = interceptor.provenance, interceptor.memo
        self.run_site, self.mode = interceptor.run_known_site, interceptor.mode
        modules = self.provenance.modules
        self.readings = Readings(interceptor.keeper, interceptor.taps.blocks, modules)
        self.plans: dict[Any, Plan | None] = {}  # None: left to the mode
        self._changes: dict[Any, int] = {}
        self._seen: set[Any] = set()  # signatures
        self._off_for_good = False
        self.learning: Pass | None = None
        self.under_way = False  # is a pass learned or followed?
        self.plan: Plan | None = None  # that is followed by this pass
        self.micro: MicroBatch | None = None  # of the batch
        self.reason: str | None = None  # why the batch cannot be scored
        self.followed = 0  # passes of this batch
        self._graph = Graph()
        self._next = 0  # step of the plan
        self._off = False  # is the mode off?
        self._hooks: list[Any] = []
        self._thread = 0
        self._dressed: list[Tensor] = []
        self._signed: Any = None
        self._class = dressed(self.call)
        self.on_loss: Callable[[Any, Any], None] | None = None  # gets losses of a followed pass
        self.instead: Callable[[Plan], bool] = lambda plan: False  # may take a pass over
        self.provenance.on_unseen = self._unseen

    def new_batch(self, micro: MicroBatch) -> None:
        self.reason, self.followed, self.micro = None, 0, micro

    def collect(self) -> None:
        """The batch is over: hand over what the backward pass has left."""
        if self.reason is None and self.micro is not None:
            self.readings.collect(self.micro)

    def forget(self) -> None:
        """Let go of the batch."""
        self.micro = None
        self.readings.forget()

    def clear(self) -> None:
        self.plans.clear()
        self._changes.clear()
        self._seen.clear()

    # The model's own call, from outside any other of its modules

    def entered(self, args: Any, kwargs: Any) -> None:
        """The model is called and its inputs have their origins."""
        self._end()
        signature = None if self._off_for_good else self._signature(args, kwargs)
        if signature is None:
            return
        known = self.plans.get(signature)
        if known is None and signature in self.plans:
            return
        self.under_way = True
        if known is not None and not known.options_unchanged:
            known = None
            del self.plans[signature]
        trusted = known is not None and known.passes % _AGAIN >= _PASSES
        self._graph = Graph(known.wanted if known is not None and trusted else None)
        if known is not None and trusted:
            known.passes += 1
            if self.instead(known):
                self.under_way = False
                return
            self.plan, self._next, self._signed = known, 0, signature
            self._hooks.append(known.start.register_forward_pre_hook(Start(self.start)))
            return
        if signature not in self._seen:  # something in it may be compiled: that is seen now
            self._seen.add(signature)
            return
        self.learning = Pass(signature)
        called = Called(self.learning)
        self._hooks += [m.register_forward_pre_hook(called) for m in self.provenance.modules]

    def compiled(self) -> None:
        """A compiled graph runs, and would see hooks on its modules: leave all to the mode."""
        self._off_for_good = True
        self.spoil()

    def left(self, out: Any) -> None:
        """The model's call is over."""
        learned, plan, off = self.learning, self.plan, self._off
        self._back()
        try:
            if learned is not None:
                self._learn(learned, out)
            elif plan is not None and off:
                self._conclude(plan, out)
            elif plan is not None:  # its first module was not called, or not in its turn
                self._drop()
        finally:
            self._end()

    def _end(self) -> None:
        self._back()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.learning, self.plan, self.under_way = [], None, None, False
        self._graph = Graph()

    close = _end  # the batch is over, perhaps by an exception

    def _signature(self, args: Any, kwargs: Any) -> Any:
        """What the analysis of the pass depends on; None: it is left to the mode."""
        provenance = self.provenance
        if not torch.is_grad_enabled() or functorch_transforms_active() or saved_tensors_hooks():
            return None
        if get_eval_frame_callback() is not None or provenance.expects_recomputation:
            return None
        if provenance.on_positions is not None or top_mode() is not self.mode:
            return None
        found: list[Any] = [provenance.B, provenance.slots, *map(current, ("cpu", "cuda"))]
        found += map(_training, provenance.modules)
        for path, x in open_leaves(args, kwargs):
            if isinstance(x, Tensor):
                mark = None if self.memo is None or x.is_nested else self.memo.mark(x)
                if mark is None:
                    return None
                found += (path, mark)
            elif isinstance(x, NUMBERS):
                found += (path, type(x), x)
            else:
                return None
        return tuple(found)

    # Learning

    def site(self, func: Any, args: Any, kwargs: Any, site: Site, out: Tensor) -> None:
        """A site that the memo knew has run under the mode."""
        learned = self.learning
        if learned is not None and saved_tensors_hooks():
            self.spoil()  # checkpointing, perhaps: it recomputes
            return
        if learned is None and self.plan is None:
            return
        leaves = (*args, *kwargs.values())
        others = [x.grad_fn for x in leaves if isinstance(x, Tensor) and not self._watched(x)]
        try:
            if learned is None:  # in the stem of a plan
                for node in others:
                    self._graph.number(node)
                self.new_site(out)
                return
            step = Step(func, tuple(kwargs), tuple([self._pattern(x) for x in leaves]), site)
            source, step.reads = self.readings.how(site, leaves, out)
            learned.sites.append(Met(step, out.grad_fn, tuple(others), source))
            if any(leaves[i].grad_fn is None for i in site.batched) or site.several:
                self.missed()  # part of the stem
        except OtherPlanError:
            if learned is None:  # the mode is on: nothing is lost
                self._drop()
            self.spoil()

    def new_site(self, out: Tensor) -> None:
        """A site was analysed that the memo did not know."""
        if self.plan is not None:
            self._next += 1
        if self.learning is not None:
            self.learning.sites.append(Met(Step(None, (), (), None), out.grad_fn))
            self.missed()
        elif out.grad_fn is not None:
            self._graph.tapped(out.grad_fn)

    def answered(self, args: Any, kwargs: Any) -> None:
        """The memo knew a call that is no site. One with a parameter must be seen by the mode."""
        if self.learning is not None and any(map(self._watched, tensors_in(args, kwargs))):
            self.missed()

    def missed(self) -> None:
        """A call must be seen by the mode in every pass: the memo did not know it."""
        if self.learning is not None:
            self.learning.events.append((None, len(self.learning.sites)))

    def loss(self, node: Any, origin: Any) -> None:
        """A loss was read under the mode (signals.py). In a followed pass it is read from its node,
        if all parameters have been used before it and its rows are described by a layout."""
        if self.learning is not None:
            self.learning.losses.append((len(self.learning.sites), node, origin))
            self.missed()

    def _drop(self) -> None:
        """The pass is another than its plan; the mode is on."""
        self.plans[self._signed] = self.plan = None

    def spoil(self) -> None:
        """This pass cannot be described by a plan."""
        if self.learning is not None:
            self.plans[self.learning.signature] = None
            self.learning = None

    def _watched(self, x: Tensor) -> bool:
        node = self.provenance.nodes.get(id(x))
        return node is not None and node.param is x

    def _pattern(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            if not isinstance(x, (*NUMBERS, tuple, list, torch.Size)):
                raise OtherPlanError
            return x
        return x if self._watched(x) else (x.shape, x.dtype, version_of(x))

    def _learn(self, learned: Pass, out: Any) -> None:
        plan = self._made(learned, out)
        signature = learned.signature
        if len(self.plans) >= _SIGNATURES and signature not in self.plans:
            return
        known = self.plans.get(signature)
        if plan is not None and known is not None and known.same(plan):
            known.passes += 1
            return
        self._changes[signature] = self._changes.get(signature, 0) + 1
        if self._changes[signature] > _CHANGES:
            self.plans[signature] = None
        elif plan is not None:
            self.plans[signature] = plan

    def _made(self, learned: Pass, out: Any) -> Plan | None:
        """The plan of a pass; None if there cannot be one."""
        if self.provenance.expects_recomputation:
            return None
        found = [
            (path, t.shape, t.dtype, t.grad_fn, self.provenance.known(t))
            for path, t in named_tensors(out, "out")
        ]
        return None if any(x[4] is None for x in found) else learned.plan(found)

    # Following

    def start(self) -> None:
        """The module is called from which on the plan holds."""
        plan = self.plan
        if plan is None or self._off or self._next != plan.stem or top_mode() is not self.mode:
            return
        self.mode.__exit__(None, None, None)
        self._off, self._thread, self._next = True, threading.get_ident(), 0
        self._dressed = list(plan.params)
        for p in self._dressed:
            p.__class__ = self._class

    def _back(self) -> None:
        """Put things back as they were before ``start``."""
        if self._off:
            self._off = False
            for p in self._dressed:
                p.__class__ = nn.Parameter
            self._dressed = []
            self.mode.__enter__()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call in which a watched parameter takes part, while the mode is off."""
        plan = self.plan
        if func in PASSED_ON or self.reason is not None or plan is None:
            return func(*args, **kwargs)
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        leaves = (*args, *kwargs.values())
        step = plan.called[self._next] if self._next < len(plan.called) else None
        site = None if step is None else step.site
        if step is None or site is None or not self._expected(step, func, leaves, kwargs):
            self._differs()
            return func(*args, **kwargs)
        self._next += 1
        out = self.run_site(func, args, kwargs, site)
        if out.shape != site.call.shape or out.grad_fn is None:
            self._differs()
        else:
            self._graph.tapped(out.grad_fn)
        return out

    def _expected(self, step: Step, func: Any, leaves: Sequence[Any], kwargs: Any) -> bool:
        if func is not step.func or len(leaves) != len(step.leaves) or tuple(kwargs) != step.names:
            return False
        roots = iter(step.roots)
        try:
            for x, want in zip(leaves, step.leaves, strict=True):
                if x is want:
                    continue
                if isinstance(x, Tensor):
                    if isinstance(want, Tensor) or (x.shape, x.dtype, version_of(x)) != want:
                        return False
                    if self._graph.number(x.grad_fn) != next(roots):
                        return False
                elif type(x) is not type(want) or x != want:
                    return False
        except (OtherPlanError, StopIteration):
            return False
        return True

    def _unseen(self) -> None:
        """A tensor turned up that was made while the mode was off and is no output of the model."""
        if self.followed:
            self._differs()

    def _differs(self) -> None:
        self.reason = CHANGED
        self.plans[self._signed] = None

    def _conclude(self, plan: Plan, out: Any) -> None:
        """Compare what the model returns, and note its origins."""
        outputs = list(named_tensors(out, "out"))
        try:
            if self.reason is None and self._next != len(plan.called):
                raise OtherPlanError
            found = [(k, t.shape, t.dtype, self._graph.number(t.grad_fn)) for k, t in outputs]
            if found != [x[:4] for x in plan.outputs] or len(self._graph.met) != plan.read:
                raise OtherPlanError
            if self.reason is None:
                self._read(plan, [t.grad_fn for _, t in outputs if t.grad_fn is not None])
            if self.on_loss is not None and self.reason is None:
                for number, logits in plan.losses:
                    self.on_loss(self._graph.node(number), logits)
        except OtherPlanError:
            self._differs()
        self.followed += 1
        for (_, t), want in zip(outputs, plan.outputs, strict=False):
            origin: Origin = want[4]
            if self.provenance.known(t) is None and t.grad_fn is not None:
                self.provenance.note(t, origin)

    def _read(self, plan: Plan, ends: Sequence[Any]) -> None:
        """Read the operations that were not seen from the graph."""
        assert self.micro is not None
        for number, node in sorted(self._graph.met, key=itemgetter(0)):
            self.readings.read(plan.steps[number], node)
        self.readings.begin_with(ends, self.micro)
