"""A model whose parameters ``torch.distributed.fsdp.fully_shard`` has spread over ranks (FSDP2).

Each rank has a part of every parameter, its *shard* (``Shard``), with gradient and optimizer state
of that part. Around the forward and backward pass of a module FSDP *gathers* its parameters:
the module has whole ones then, plain tensors that are made once and whose memory comes and goes.

So inrun works in two places. Update map, path and secant are computed coordinate by coordinate, on
shards. Examples meet whole parameters; the capture is told the name of each (``Shards.name_of``).
Where directions meet examples, one group of parameters is gathered at a time.

Every rank calls the same functions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from inrun.errors import BatchError
from inrun.ranks.stretch import Stretch
from inrun.ranks.torch_compat import local_of, no_torch_function, sharded_groups, sharding_states
from inrun.torch_compat import COMPILED_PREFIX, DisableTorchFunction

WAITING = (
    "optimizer.step() while gradients wait to be averaged over ranks (set_requires_gradient_sync("
    "False) in the last batch): this step would leave them out. Set it to True for the last batch "
    "before each step"
)
GATHERED = (
    "optimizer.step() while parameters are gathered (set_reshard_after_backward(False), or a pass "
    "of the model between backward() and step()): fully_shard goes on with the copies that were "
    "gathered, as they were before the step. Call reshard() of the modules before the step"
)
# Steps of a group's work in which torch functions are called that are nobody's forward pass.
_WORK = ("lazy_init", "unshard", "wait_for_unshard", "reshard", "post_backward")
# What a backward pass does with gradients: for a validation pass all are averaged at once.
_AVERAGING = {"reduce_grads": True, "all_reduce_grads": True, "reshard_after_backward": True}


class Shard(Tensor):
    """This rank's part of a parameter, in the same memory, with its gradient."""

    whole: Tensor  # the parameter, a DTensor
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(p: Tensor) -> Shard:
        made = local_of(p).detach().as_subclass(Shard)
        made.whole = p
        return made

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        g = self.whole.grad
        return None if g is None else local_of(g)


def whole(p: Tensor) -> Tensor:
    """The parameter that this is a shard of, or ``p`` itself."""
    return p.whole if isinstance(p, Shard) else p


def is_sharded(p: Tensor) -> bool:
    """Is it a parameter of which each rank has a part (a DTensor)?"""
    return local_of(p) is not p


@contextmanager
def placed(params: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[None]:
    """Context in which parameters have these weights. Shards are written to, since FSDP gathers
    from their memory, and their own numbers are set aside in the memory of ``weights`` meanwhile;
    others get other memory."""
    pairs = list(zip(params, weights, strict=True))
    others = [(p, w) for p, w in pairs if not isinstance(p, Shard)]
    own = [p.data for p, _ in others]
    exchanged: list[tuple[Tensor, Tensor]] = []
    try:
        for p, w in others:
            p.data = w
        for p, w in pairs if len(others) < len(pairs) else ():
            if isinstance(p, Shard):
                new = w.clone()
                kept = w.copy_(p.detach()) if w.dtype == p.dtype else p.detach().clone()
                exchanged.append((p.detach(), kept))
                p.detach().copy_(new)
        yield
    finally:
        for shard, kept in exchanged:
            new = shard.clone()
            shard.copy_(kept)
            kept.copy_(new)
        for (p, _), data in zip(others, own, strict=True):
            p.data = data


class Group:
    """Parameters that FSDP gathers together."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def params(self) -> list[Any]:
        """FSDP's object for each parameter."""
        return list(self.raw.fsdp_params)

    def around(self, other: Group) -> bool:
        """Is a module of the other group inside one of this?"""
        inside = {id(m) for own in self.raw.modules for m in own.modules() if m is not own}
        return any(id(m) in inside for m in other.raw.modules)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the parameters are whole."""
        self.raw.unshard()
        self.raw.wait_for_unshard()
        try:
            yield
        finally:
            self.raw.reshard()


class Shards:
    """What FSDP made of a model.

    ``ranks``: the process group over which parameters are spread; ``replicas``: how many such
    groups hold the same shards (HSDP).
    """

    def __init__(self, model: nn.Module, states: Sequence[Any]) -> None:
        self._model, self._states = model, list(states)
        groups = [Group(raw) for state in states for raw in sharded_groups(state)]
        inner = {id(g): [h for h in groups if g.around(h)] for g in groups}
        self.outer = [g for g in groups if inner[id(g)]]  # groups of modules that contain others
        self.inner = [g for g in groups if not inner[id(g)]]
        self.groups = self.outer + self.inner
        self._own: dict[int, Shard] = {}  # by the id of the parameter
        self._names: dict[int, tuple[Any, str]] = {}  # of parameters, sharded and gathered, by id

    @staticmethod
    def of(model: nn.Module) -> Shards | None:
        """None if no module of the model was given to ``fully_shard``."""
        states = sharding_states(model)
        return Shards(model, states) if states else None

    @property
    def mesh(self) -> Any:
        """The mesh of the first group; others have the same (run/sharding.py)."""
        return self.groups[0].raw.mesh_info.mesh

    @property
    def ranks(self) -> Any:
        return self.groups[0].raw.mesh_info.shard_process_group

    @property
    def group(self) -> Any:
        """The process group of all ranks that average gradients."""
        return self.mesh.get_group() if self.mesh.ndim == 1 else dist.group.WORLD

    @property
    def replicas(self) -> int:
        return int(self.mesh.size()) // dist.get_world_size(self.ranks)

    @property
    def device(self) -> torch.device:
        """Where the model computes; shards may be elsewhere (CPU offload)."""
        found: torch.device = self.groups[0].raw.device
        return found

    @property
    def coarse(self) -> bool:
        """Are parameters or gradients cast to half precision on their way?"""
        half = (torch.float16, torch.bfloat16)
        policies = [g.raw.mp_policy for g in self.groups]
        return any(p.param_dtype in half or p.reduce_dtype in half for p in policies)

    def own(self, p: Tensor) -> Tensor:
        """The shard of a parameter, the same object as long as it is in the same memory."""
        local = local_of(p)
        if local is p:
            return p
        kept = self._own.get(id(p))
        if kept is None or kept.whole is not p or kept.data_ptr() != local.data_ptr():
            kept = self._own[id(p)] = Shard.of(p)
        return kept

    # The training's passes

    def name_of(self, t: Tensor) -> str | None:
        """The name of a parameter, gathered or not; None if FSDP does not know it."""
        known = self._names.get(id(t))
        if known is None or known[0] is not t:
            named = self._model.named_parameters()
            own = {id(p): k.removeprefix(COMPILED_PREFIX) for k, p in named}
            self._names = {}
            for raw in (raw for group in self.groups for raw in group.params):
                both = [raw.sharded_param, getattr(raw, "_unsharded_param", raw.sharded_param)]
                name = next((own[id(p)] for p in both if id(p) in own), None)
                if name is not None:
                    self._names |= {id(p): (p, name) for p in both}
            known = self._names.get(id(t))
        return None if known is None or known[0] is not t else known[1]

    def named(self, group: Group) -> dict[str, Any]:
        """FSDP's object for each parameter of a group, by name."""
        found = {self.name_of(raw.sharded_param): raw for raw in group.params}
        return {k: raw for k, raw in found.items() if k is not None}

    @contextmanager
    def watched(self, passed_on: Callable[[Any, Any], None]) -> Iterator[None]:
        """Context in which no mode sees what FSDP does around a module's passes.

        Inputs of a module go through an autograd function of FSDP's, which tells when its backward
        pass is over: ``passed_on(before, after)`` is called with the module's arguments.
        """
        changed: list[tuple[Any, str]] = []

        def put(x: Any, name: str, f: Any) -> None:
            setattr(x, name, f)
            changed.append((x, name))

        try:
            for raw in (g.raw for g in self.groups):
                for name in _WORK:
                    put(raw, name, _quiet(getattr(raw, name)))
                put(raw, "_register_post_backward_hook",
                    _told(raw._register_post_backward_hook, passed_on))  # fmt: skip
            for state in self._states:
                put(state, "_register_pre_backward_hook", _quiet(state._register_pre_backward_hook))
            yield
        finally:
            for x, name in changed:
                delattr(x, name)

    def reshard(self) -> None:
        """Free all gathered parameters."""
        for group in self.groups:
            group.raw.reshard()

    def refuse_unfinished(self) -> None:
        """Before a step: all gradients are averaged and all parameters are in their shards."""
        for group in self.groups:
            raws = group.params
            left = [r.unsharded_accumulated_grad for r in raws]
            left += [r._unsharded_param.grad for r in raws if hasattr(r, "_unsharded_param")]
            if group.raw._partial_reduce_output is not None or any(x is not None for x in left):
                raise BatchError(WAITING)
            if not group.raw.is_sharded:
                raise BatchError(GATHERED)

    # Validation passes

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around validation passes: gradients are averaged in each, FSDP's notes are as before
        at the end."""
        raws = [g.raw for g in self.groups]
        options = [(raw, {k: getattr(raw, k) for k in _AVERAGING}) for raw in raws]
        contexts = {id(s._state_ctx): s._state_ctx for s in self._states}.values()
        last = [(c, c.is_last_backward) for c in contexts]
        orders = {id(raw.comm_ctx): raw.comm_ctx.post_forward_order for raw in raws}.values()
        lists = [*orders, *(raw._post_forward_indices for raw in raws)]
        noted = [(x, list(x)) for x in lists]
        try:
            for raw in raws:
                vars(raw).update(_AVERAGING)
            for c, _ in last:
                c.is_last_backward = True
            yield
        finally:
            self.reshard()
            for raw, own in options:
                vars(raw).update(own)
            for c, own_last in last:
                c.is_last_backward = own_last
            for x, before in noted:
                x[:] = before

    def gradient(self, loss: Tensor, shards: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of the mean over ranks of their losses, by ``backward()``; the training's
        own is set aside meanwhile."""
        # During a pass the model has gathered parameters in place of shards.
        spread = (raw.sharded_param for group in self.groups for raw in group.params)
        known = (*self._model.parameters(), *spread)
        every = [p for p in {id(p): p for p in known}.values() if p.requires_grad]
        own = [p.grad for p in every]
        try:
            for p in every:
                p.grad = None
            loss.backward()
            found = [s.grad for s in shards]
            return [torch.zeros_like(s) if g is None else g
                    for g, s in zip(found, shards, strict=True)]  # fmt: skip
        finally:
            for p, g in zip(every, own, strict=True):
                p.grad = g

    # From shards to whole tensors

    def in_turn(self, names: Collection[str]) -> Iterator[dict[str, Any]]:
        """FSDP's objects for these parameters by name, a group at a time, while all parameters are
        whole that an operation of theirs may have used: their own, and those of the modules around
        them. That is what FSDP itself holds in a forward pass."""
        with ExitStack() as stack:
            for group in self.outer:
                stack.enter_context(group.gathered())
            for group in self.groups:
                raws = {k: raw for k, raw in self.named(group).items() if k in names}
                if raws:
                    with nullcontext() if group in self.outer else group.gathered():
                        yield raws

    def joined(self, raws: Mapping[str, Any], x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors [Q, *shard] of all ranks as tensors [Q, *whole], for parameters of one group. One
        collective."""
        W, Q = dist.get_world_size(self.ranks), len(next(iter(x.values())))
        sent = []
        for k, raw in raws.items():
            padded = x[k].new_zeros(Q, *raw.padded_sharded_param_size)
            padded[tuple(slice(n) for n in x[k].shape)] = x[k]
            sent.append(padded.flatten())
        flat = torch.cat(sent)
        received = self._gathered(flat, W).view(W, -1)
        found, at = {}, 0
        for k, raw in raws.items():
            size, dim = raw.padded_sharded_param_size, raw.fsdp_placement.dim
            n = Q * size.numel()
            parts = received[:, at : at + n].view(W, Q, *size).unbind()
            full = torch.cat(parts, dim=1 + dim)
            found[k] = full.narrow(1 + dim, 0, raw._orig_size[dim]).to(self.device)
            at += n
        return found

    def own_part(self, raw: Any, x: Tensor) -> Tensor:
        """Of tensors [n, *whole] for a parameter the part of this rank's shard: [n, *shard]."""
        dim, shape = raw.fsdp_placement.dim, local_of(raw.sharded_param).shape
        at = dist.get_rank(self.ranks) * raw.padded_sharded_param_size[dim]
        return x.narrow(1 + dim, min(at, x.shape[1 + dim]), shape[dim])

    def stretches(self, raw: Any) -> list[list[Stretch]]:
        """The coordinates of a parameter that each rank of ``group`` has; replicas of a shard share
        them out."""
        shape, dim = raw._orig_size, raw.fsdp_placement.dim
        D, inner, size = shape[dim], shape[dim + 1 :].numel(), raw.padded_sharded_param_size[dim]
        W = dist.get_world_size(self.ranks)
        grid = self.mesh.mesh.reshape(-1, W).tolist()
        found: dict[int, list[Stretch]] = {}
        for (replica, row), s in product(enumerate(grid), range(W)):
            low, high = min(s * size, D), min((s + 1) * size, D)
            n, outer = (high - low) * inner, shape[:dim].numel()
            edges = [n * outer * k // len(grid) for k in (replica, replica + 1)]
            held = [Stretch(o * n, (o * D + low) * inner, n) for o in range(outer)]
            cut = [(x.own, x.at + edges[0], x.n) for x in (h.between(*edges) for h in held)]
            found[row[s]] = [Stretch(*x) for x in cut]
        return [found[rank] for rank in dist.get_process_group_ranks(self.group)]

    def _gathered(self, flat: Tensor, W: int) -> Tensor:
        """The numbers of all ranks, one after the other."""
        if W == 1:
            return flat
        gloo = dist.get_backend(self.ranks) == "gloo"
        flat = flat.to("cpu" if gloo else self.device)
        out = flat.new_empty(W * flat.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of 2.11
        gather(out, flat, group=self.ranks)
        return out


def _quiet(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, out of sight of modes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return f(*args, **kwargs)

    return run


def _told(f: Callable[..., Any], passed_on: Callable[[Any, Any], None]) -> Callable[..., Any]:
    def run(args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():
            out = f(args, kwargs)
            passed_on((args, kwargs), out)
        return out

    return run
