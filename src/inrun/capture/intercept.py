"""Intercepts every call of a torch function while a batch is open.

A call is one of

* known: the memo has its site or the origins of its outputs;
* a site: nodes meet batched tensors. The operation runs and its output gets a tap;
* something else: it runs, and the origins of its outputs are noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inrun.capture.aside import Aside
from inrun.capture.inputs import Inputs
from inrun.capture.memo import Key, Memo, Outcome, tensors_of
from inrun.capture.micro_batch import Keeper, MicroBatch
from inrun.capture.mode import PASSED_ON, Mode, keeps_graph, opened
from inrun.capture.outputs import Outputs
from inrun.capture.pairs import halves
from inrun.capture.provenance import OUTSIDE, PAIRS, Origin, any_batched, has_rows, shared_by_all
from inrun.capture.site import Site, Taps, has_pure_form, put, rows_of
from inrun.errors import data_without_ids, nested, number_of_all, refusal, transformed
from inrun.gradients import op_rule
from inrun.gradients.arguments import flatten
from inrun.gradients.call import Place
from inrun.gradients.nodes import Node
from inrun.tensors.autocast import Autocast, current
from inrun.tensors.layout import Layout, Lost, in_place, name_of, tensors_in
from inrun.tensors.owners import NOBODY, Owners
from inrun.torch_compat import (
    base_of,
    composite,
    functorch_transforms_active,
    saved_tensors_hooks,
    tree_map,
    unwrapped,
)

_BACKWARD = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_LIKE = ("to", "type_as", "view_as", "reshape_as", "expand_as")  # use the other's type or shape


class Interceptor:
    """Runs the calls of one forward pass and taps its sites.

    The capture has one for eager code. The planner of a compiled graph has its own, which shares
    the capture's provenance and has no memo: it sees each call once, on tensors without data.
    """

    def __init__(
        self, inputs: Inputs, outputs: Outputs, taps: Taps, keeper: Keeper, memo: Memo | None
    ) -> None:
        self.inputs, self.outputs, self.provenance = inputs, outputs, outputs.provenance
        self.taps, self.keeper, self.memo = taps, keeper, memo
        self.micro: MicroBatch | None = None
        self.backward_under: dict[str, Autocast] = {}  # at the last backward pass, by device
        self.calls, self.opened = 0, list[int]()  # calls seen; which were composite (planner)
        self.mode = Mode(self.call, () if memo is None else PASSED_ON)  # the planner counts all
        self.aside = Aside(self)

    def open(self, micro: MicroBatch | None) -> None:
        """Put the records of all taps from now on into this micro-batch (None: it is over)."""
        self.micro = micro
        self.receive: Any = None if micro is None else partial(self.keeper.receive, micro)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One intercepted call."""
        self.calls += 1
        if func in _BACKWARD:
            return self._run_backward(func, args, kwargs)
        if self.aside.reason is not None:  # the batch is void
            return func(*args, **kwargs)
        if functorch_transforms_active():
            self._refuse_transformed(args, kwargs)
        if self.memo is None:
            run_only = func in PASSED_ON
            return func(*args, **kwargs) if run_only else self._first_call(func, args, kwargs, None)
        key, known = self.memo.look_up(func, args, kwargs)
        if type(known) is Site:
            out = self.run_known_site(func, args, kwargs, known)
            if self.aside.under_way:
                self.aside.site(func, args, kwargs, known, out)
            return out
        if type(known) is not Outcome or (known.constant and self.provenance.expects_recomputation):
            return self._first_call(func, args, kwargs, key)
        if self.aside.under_way:
            self.aside.answered(args, kwargs)
        out = func(*args, **kwargs)
        if not known.note(out, self.provenance):
            if known.constant:
                self.outputs.note_constant(func, tensors_in(args, kwargs), out)
            else:
                self.outputs.note_batched(func, args, kwargs, out)
        return out

    def _first_call(self, func: Any, args: Any, kwargs: Any, key: Key | None) -> Any:
        """Analyse a call that is not in the memo, and run it."""
        self.aside.missed()
        tensors = tensors_in(args, kwargs)
        origins = self.provenance.find_all(tensors)
        parametric = any(type(x) is Node for x in origins)
        if parametric and not any_batched(origins):
            origins = self._anchor_operands(func, tensors, origins)
        batched, name = any_batched(origins), name_of(func)
        if parametric and batched and name in _LIKE:
            parametric = type(origins[0]) is Node
            batched = not parametric or name not in ("to", "type_as")
        if parametric and batched and shared_by_all(name, tensors, origins, self.provenance.B):
            batched = False
        if parametric and torch.is_grad_enabled() and name == "setitem":
            return self._write_parameter(func, args, batched)
        if parametric and batched and torch.is_grad_enabled():
            return self._run_new_site(func, args, kwargs, key)
        if parametric and batched:  # no gradients: the first pass of a reentrant checkpoint
            self._expect_recomputation()
        if batched and torch.is_grad_enabled():
            self.outputs.refuse_unseen(tensors, origins)
        before = self.outputs.before(func, args) if parametric and not batched else args
        out = func(*args, **kwargs)
        if batched:
            self.outputs.note_batched(func, args, kwargs, out)
            cacheable = not parametric and not self.outputs.by_content
            if in_place(func):
                changed = self.provenance.find_all(tensors_of(out) or ()) != origins[:1]
                cacheable = cacheable and type(origins[0]) is not Lost and not changed
            if self.memo is not None and key is not None and cacheable:
                self.memo.store_outcome(key, out, constant=False)
        elif parametric:
            self.outputs.note_parametric(func, before, kwargs, out, planning=self.memo is None)
        elif any(x is OUTSIDE or has_rows(x) for x in origins):
            self.outputs.note_data(func, args, kwargs, out)
        else:
            drawn = self.outputs.note_constant(func, tensors, out)
            if self.memo is not None and key is not None and not drawn:
                self.memo.store_outcome(key, out, constant=True)
        return out

    def _anchor_operands(
        self, func: Any, tensors: Sequence[Tensor], origins: Sequence[Origin]
    ) -> list[Origin]:
        """Outside any module, data that meets a parameter is what the model receives."""
        if any(has_rows(x) for x in origins):
            roots = sorted(r for x in origins if isinstance(x, Node) for r in x.roots)
            name = f"the operand of '{name_of(func)}' with {', '.join(roots[:2])}"
            self.inputs.anchor([(name, t) for t in tensors])
        return self.provenance.find_all(tensors)

    # Sites

    def _run_new_site(self, func: Any, args: Any, kwargs: Any, key: Key | None) -> Any:
        """Nodes meet batched tensors: analyse and run the operation, and tap its output."""
        assert self.micro is not None
        self.micro.met = True
        rule = op_rule(func)
        if rule is None and (body := opened(func)) is not None:
            self.opened.append(self.calls - 1)
            with self.mode:
                return body(*args, **kwargs)
        if rule is not None and rule.place is not None:
            return self._run_fused_loss(func, args, kwargs, rule.place)
        leaves, spec = flatten(args, kwargs)
        nodes, batched = self.provenance.operands(leaves)
        claims = {c: name_of(func) for x in batched if x is not None for c in x.claims}
        self.micro.claims.update(claims)
        if any(isinstance(x, Tensor) and x.is_nested for x in leaves):
            raise nested([n for n in nodes if n is not None])
        if any(isinstance(x, Owners) and not x.map.numel() for x in batched):  # an empty expert
            for node in (n for n in nodes if n is not None):
                self.micro.records.setdefault(node, [])
            out = func(*args, **kwargs)
            self.outputs.note_batched(func, args, kwargs, out)
            return out
        site = self.taps.site(func, leaves, spec, nodes, batched, self.provenance.B, self.micro)
        given, saved = site.arguments(leaves)
        out = _run(func, given, site)
        if not site.detached and not any(t.requires_grad for t in tensors_in(out)):
            self.outputs.note_batched(func, args, kwargs, out)
            return out
        if site.several and type(out) is tuple:
            return self._tap_several(out, site, saved, func, args, kwargs)
        if not isinstance(out, Tensor) or not has_pure_form(func):
            raise refusal(site.call.with_(leaves=saved), tensors_in(out), "it has no rule")
        of_pairs = self.outputs.of_pairs(func, args, kwargs, out)
        if of_pairs:
            site = replace(site, rule=halves, call=site.call.with_(shape=out.shape))
        else:
            site = self._placed(site, func, args, kwargs, out, saved)
        cacheable = spec.nested is None and not in_place(func) and not claims and not of_pairs
        cacheable = cacheable and not self.outputs.by_content
        out = self._tap(out, site, leaves, saved)
        self.aside.new_site(out)
        if of_pairs:
            self.provenance.note(out, PAIRS)
        if self.memo is not None and key is not None and cacheable:
            self.memo.store(key, replace(site, mark=self.memo.mark(out)))
        return out

    def _run_fused_loss(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        """A loss and its head in one operation: run it, and tap each output that has a gradient."""
        assert self.micro is not None
        self.aside.spoil()
        leaves, spec = flatten(args, kwargs)
        nodes, batched = self.provenance.operands(leaves)
        site = self.taps.site(func, leaves, spec, nodes, batched, self.provenance.B, self.micro)
        given, saved = site.arguments(leaves)
        call = site.call.with_(leaves=saved)
        if self.memo is None:
            raise refusal(call, [], "a fused loss is not scored inside a compiled graph")
        try:
            layout, outputs = place(call)
        except NotImplementedError as e:
            raise refusal(call, [], str(e)) from None
        if layout is None:
            origins = self.provenance.find_all(tensors_in(leaves))
            by = [f" since '{x.by}'" for x in origins if isinstance(x, Lost)]
            why = "the examples cannot be told apart in its input" + "".join(by[:1])
            raise refusal(call, [], why)
        if isinstance(layout, Layout):
            self.micro.claims.update(dict.fromkeys(layout.claims, call.name))
        out = _run(func, given, site)
        self.outputs.note_batched(func, args, kwargs, out)
        parts = list(out) if isinstance(out, tuple) else [out]
        for i, part in enumerate(parts[:outputs]):
            if part is not None and (part.requires_grad or site.detached):
                own = call.with_(part=i, shape=part.shape, layout=layout)
                # The function may have saved its output, and the tap counts as writing to it.
                parts[i] = self._tap(part.clone(), replace(site, call=own), leaves, saved)
                self.provenance.note(parts[i], self.provenance.find(part))
        return tuple(parts) if isinstance(out, tuple) else parts[0]

    def run_known_site(self, func: Any, args: Any, kwargs: Any, site: Site) -> Any:
        """Run the operation of a site in the memo, and tap its output."""
        leaves = (*args, *kwargs.values())
        if site.fused is not None and not saved_tensors_hooks():
            autocast = current("cpu")
            if not autocast[1]:
                assert self.micro is not None
                self.micro.met, self.micro.autocast = True, autocast
                out = self.taps.fused(site, leaves, self.receive, autocast)
                self._note_output(out, site)
                return out
        given, saved = site.arguments(leaves)
        out = _run(func, given, site) if site.detached else func(*args, **kwargs)
        if not site.detached and not out.requires_grad:
            self.outputs.note_batched(func, args, kwargs, out)
            return out
        if out.shape != site.call.shape:
            site = self._placed(site, func, args, kwargs, out, saved)
        return self._tap(out, site, leaves, saved)

    def _placed(
        self, site: Site, func: Any, args: Any, kwargs: Any, out: Tensor, saved: Sequence[Any],
        result: Any = None,
    ) -> Site:  # fmt: skip
        """The site with the layout and shape of its output; refuses it if that has no layout."""
        self.outputs.by_content = False
        result = out if result is None else result
        origin = self.outputs.derive(func, args, kwargs, out, result)
        if not has_rows(origin):
            why = "the examples cannot be told apart in its output"
            if isinstance(origin, Lost) and origin.by != name_of(func):
                why += f" since '{origin.by}'"
            raise refusal(site.call.with_(leaves=saved), [out], why)
        layout, n = rows_of(origin, out.shape, self.provenance.B)
        call = site.call.with_(layout=layout, shape=out.shape, B=n)
        return replace(site, origin=origin, call=call)

    def _tap(self, out: Tensor, site: Site, leaves: Sequence[Any], saved: Sequence[Any]) -> Tensor:
        """Tap the output of a site that has run; the tap holds the ``saved`` leaves."""
        assert self.micro is not None
        call = site.call
        if site.origin is not None:
            positions = self.micro.positions(site.origin, call.B, out.device)
            if positions is not call.positions:
                call = call.with_(positions=positions)
        packed = saved_tensors_hooks()
        if packed:
            self._expect_recomputation()
        out, call = self.taps.tap(out, site, call, leaves, saved, self.receive, packed)
        self.micro.met, self.micro.autocast = True, call.autocast
        self._note_output(out, site)
        return out

    def _note_output(self, out: Tensor, site: Site) -> None:
        known = site.mark is not None and self.provenance.note_known(out, site.mark)
        if site.origin is not None and not known:
            self.provenance.note(out, site.origin)

    def _tap_several(
        self, outs: tuple[Tensor, ...], site: Site, saved: Sequence[Any], func: Any, args: Any,
        kwargs: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The same for an operation with several outputs."""
        assert self.micro is not None
        if self.memo is None:
            why = "it has several outputs inside a compiled graph"
            raise refusal(site.call.with_(leaves=saved), outs, why)
        placed = [self._placed(site, func, args, kwargs, out, saved, outs) for out in outs]
        if saved_tensors_hooks():
            self._expect_recomputation()
        first = placed[0]
        assert first.origin is not None
        positions = self.micro.positions(first.origin, first.call.B, outs[0].device)
        call = first.call.with_(leaves=saved, positions=positions)
        self.aside.spoil()
        outs, call = self.taps.tap_several(outs, site, call, self.receive)
        self.micro.met, self.micro.autocast = True, call.autocast
        for out, own in zip(outs, placed, strict=True):
            assert own.origin is not None
            self.provenance.note(out, own.origin)
        return outs

    def _write_parameter(self, func: Any, args: Any, batched: bool) -> None:
        """``target[index] = parameter``: as an operation that gives a new target."""
        assert self.micro is not None
        self.aside.spoil()
        target, index, value = args
        before = target.detach().clone()
        self.provenance.assume(before, self.provenance.find(target))
        func(target, index, value)
        pure = (before, index, value)
        if not batched:
            planning = self.memo is None
            self.outputs.note_parametric(put, pure, {}, target, planning=planning)
            return
        layout = self.provenance.layout(before)
        leaves, spec = flatten(pure, {})
        nodes, operands = self.provenance.operands(leaves)
        saved = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        rows = self.provenance.B
        site = self.taps.written(put, saved, spec, nodes, operands, rows, layout or Layout(0))
        positions = None if layout is None else self.micro.positions(layout, rows, target.device)
        call = site.call.with_(leaves=saved, positions=positions)
        if layout is None or base_of(target) is not None:
            raise refusal(call, [target], "the examples cannot be told apart in the target")
        self.micro.met = True
        out = self.taps.apply(target, call, site, self.receive, None)
        self.provenance.note(out, layout)

    # Activation checkpointing recomputes in the autograd engine, which takes along the modes that
    # are on when it is called. Ours is on from the moment checkpointing is seen.

    def _expect_recomputation(self) -> None:
        if self.memo is not None:
            self.provenance.expect_recomputation()

    def _run_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self.micro is not None
        self.micro.again |= self.micro.backward or keeps_graph(func, args, kwargs)
        self.micro.backward = True
        self.backward_under = {device: current(device) for device in ("cpu", "cuda")}
        if func is not torch.autograd.grad:
            args = tree_map(self._credit_to_nobody, args)
        if not self.provenance.expects_recomputation:
            return func(*args, **kwargs)
        with self.mode:
            return composite(func)(*args, **kwargs)

    def _credit_to_nobody(self, root: Any) -> Any:
        """A loss with a part made of parameters alone (a penalty on weights): what this part does
        belongs to no example. Tapped, so that its gradient is known."""
        assert self.micro is not None
        origin = self.provenance.known(root) if isinstance(root, Tensor) else None
        if type(origin) is not Node or not root.requires_grad or not self.micro.met:
            return root
        if origin.data:
            raise data_without_ids(origin.roots)
        owner = NOBODY
        if origin.through:
            if self.micro.B > 1 or self.micro.owner is not None:
                raise number_of_all(origin.roots, origin.through)
            owner = 0
        whole = Owners(torch.full([1] * root.ndim, owner, device="cpu"))
        site = self.taps.root(root, origin, whole)
        return self._tap(root, site, (root,), (root.detach(),))

    def _refuse_transformed(self, args: Any, kwargs: Any) -> None:
        """A parameter inside torch.func.vmap or grad."""
        inner = [unwrapped(t) for t in tensors_in(args, kwargs)]
        origins = self.provenance.find_all(t for t in inner if t.requires_grad)
        roots = {r for x in origins if isinstance(x, Node) for r in x.roots}
        if roots and torch.is_grad_enabled():
            raise transformed(roots)


def _run(func: Any, leaves: Sequence[Any], site: Site) -> Any:
    """Run the operation on flat arguments."""
    args, kwargs = site.call.spec.unflatten(leaves)
    return func(*args, **kwargs)
