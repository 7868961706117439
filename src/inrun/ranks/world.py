"""The processes that train one model together. In one process everything here does nothing.

``World`` is what ``run/``, ``scoring/`` and ``validation/`` ask: how many ranks there are, sums
over them, rank 0's decision. ``World.of`` finds it from the model: the process group of
``DistributedDataParallel`` or of ``fully_shard`` (``Shards``), or the one that the loop averages
gradients over by itself (``watch(..., process_group=...)``).

Every rank calls the same functions in the same order; no call waits for a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from inrun.errors import BatchError
from inrun.ranks.shards import Shards
from inrun.ranks.torch_compat import casts_gradients, in_join
from inrun.torch_compat import uncompiled

T = TypeVar("T")


class World:
    """The ranks that train together: ``rank`` of ``size``.

    ``group``: their process group; None in one process. ``ddp``: the wrapper that averages the
    gradients, None if the loop or FSDP does it. ``shards``: what FSDP made of the model.
    """

    def __init__(
        self, group: Any = None, ddp: nn.Module | None = None, shards: Shards | None = None
    ) -> None:
        self.group, self.ddp, self.shards = group, ddp, shards
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.bytes = 0  # sent to collectives by this rank so far

    @staticmethod
    def of(model: nn.Module, process_group: Any = None) -> World:
        """The world of a model that ``watch`` was given, wrapped or not."""
        if not (dist.is_available() and dist.is_initialized()):
            return World()
        shards = Shards.of(model)
        if shards is not None:
            alone = shards.mesh.size() == 1
            return World(None if alone else shards.group, shards=shards)
        ddp = wrapper_of(model)
        group = process_group if ddp is None else ddp.process_group
        if group is None or dist.get_world_size(group) == 1:
            return World(ddp=ddp)
        return World(group, ddp)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def share(self) -> float:
        """The factor that averaging over ranks puts on the gradient of one example."""
        return 1 / self.size

    @property
    def coarse(self) -> bool:
        """Are gradients averaged in half precision?"""
        if self.shards is not None:
            return self.shards.coarse
        return self.ddp is not None and casts_gradients(self.ddp)

    def own(self, p: Tensor) -> Tensor:
        """What this rank has of a parameter: its shard, or all of it."""
        return p if self.shards is None else self.shards.own(p)

    def enter_batch(self) -> None:
        """Before a batch. Inside torch's Join a rank that runs out of inputs answers to DDP's
        collectives only, and would leave the others waiting in ours. Parameters that a pass of the
        loop has left gathered go back into their shards, which are what is trained."""
        if self.shards is not None:
            self.shards.reshard()
        if self.ddp is not None and not self.alone and in_join(self.ddp):
            raise BatchError(
                "run.batch inside torch's Join: a rank that has run out of inputs does not score, "
                "and the others would wait for it. Instead, have every rank take every step, and "
                "where one has no examples left: with run.batch([]): (0 * loss).backward(), with "
                "the loss of any row (docs/distributed.md)"
            )

    def averaged(self, x: Tensor) -> Tensor:
        """Products with gradients of this rank's examples as they are in the mean over ranks."""
        return x if self.alone else x * self.share

    # Sums over ranks

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bit for bit on each; ``x`` itself in one process."""
        if self.alone:
            return x
        nccl = self.device.type == "cuda"
        x = x.to(self.device, copy=True) if nccl else x.clone(memory_format=torch.contiguous_format)
        self._reduce(x)
        return x

    def total_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over ranks, in one collective for each type."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for t in tensors:
            kinds.setdefault(t.dtype, []).append(t)
        for some in kinds.values() if not self.alone else ():
            flat = self.total(torch.cat([t.flatten() for t in some]))
            for t, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                t.copy_(part.view_as(t))

    def total_by_name(
        self, found: Mapping[str, Tensor], names: Iterable[str], factor: float
    ) -> dict[str, Tensor]:
        """Numbers by name, each the sum over ranks times ``factor``; a rank may lack some."""
        if self.alone:
            return dict(found)
        wanted = list(names)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        own = [found[k].double().to(self.device) if k in found else zero for k in wanted]
        if not own:
            return {}
        summed = self.total(torch.stack(own)) * factor
        return dict(zip(wanted, summed.unbind(), strict=True))

    def of_whole(self, x: Tensor) -> Tensor:
        """Sums over coordinates, from those over this rank's: of all shards. ``x`` itself where
        each rank has all coordinates."""
        return x if self.shards is None else self.total(x) / self.shards.replicas

    def norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The norm of each tensor; of shards, of the whole one."""
        if self.shards is None or not tensors:
            return {k: t.norm() for k, t in tensors.items()}
        squares = torch.stack([t.double().square().sum() for t in tensors.values()])
        found = self.of_whole(squares).sqrt()
        return {k: x.to(t) for x, (k, t) in zip(found, tensors.items(), strict=True)}

    def in_turn(self, names: Collection[str]) -> Iterator[Collection[str]]:
        """These parameters, a few at a time, while they are whole in each rank's memory."""
        if self.shards is None:
            yield names
            return
        yield from self.shards.in_turn(names)

    def largest(self, x: Tensor) -> Tensor:
        """The same for a maximum."""
        if self.shards is None or self.alone:
            return x
        x = x.to(self.device, copy=True)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def any_shard(self, flag: bool) -> bool:
        """Is it so for some shard?"""
        if self.shards is None or self.alone:
            return flag
        return bool(self.total(torch.tensor(float(flag), device="cpu")))

    def exchange(self, parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """Send the r-th of these parts [C_own, n_r] to rank r; returns what all ranks sent here,
        below each other [Σ C_r, n_own]. ``counts``: C of every rank."""
        sent = torch.cat([p.flatten() for p in parts]).to(self.device)
        n = parts[self.rank].shape[1]
        received = sent.new_empty(sum(counts) * n)
        sizes = [p.numel() for p in parts]
        self.bytes += sent.numel() * sent.element_size()
        dist.all_to_all_single(received, sent, [C * n for C in counts], sizes, group=self.group)
        return received.view(sum(counts), n)

    def _reduce(self, x: Tensor) -> None:
        self.bytes += x.numel() * x.element_size()
        dist.all_reduce(x, group=self.group)

    # What ranks agree on. These wait, and are for the start of a run and for its first steps.

    def agree(self, x: T) -> T:
        """Rank 0's ``x``."""
        if self.alone:
            return x
        held = [x]
        source = dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(held, src=source, group=self.group, device=self.device)
        return held[0]

    def gather(self, x: T) -> list[T]:
        """``x`` of every rank, in order, on all of them."""
        if self.alone:
            return [x]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, group=self.group)
        return found

    def together(self, make: Callable[[], T]) -> T:
        """Returns what ``make`` does; if it raises on one rank, all of them raise."""
        if self.alone:
            return make()
        made, error = None, None
        try:
            made = make()
        except Exception as e:
            error = e
        found = self.gather(None if error is None else (type(error), str(error)))
        for rank, other in enumerate(found):
            if error is not None:
                raise error
            if other is not None:
                kind, text = other
                raise kind(f"rank {rank}: {text}")
        return made  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Where tensors for collectives must be."""
        if self.group is not None and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


ALONE = World()


def wrapper_of(model: nn.Module) -> Any:
    """The DistributedDataParallel that is, or wraps, this model; None if there is none."""
    kind, model = nn.parallel.DistributedDataParallel, uncompiled(model)
    if isinstance(model, kind):
        return model
    # type(), not isinstance: some objects answer to __class__ by importing what they stand for
    found = (x for x in gc.get_objects() if issubclass(type(x), kind))
    return next((x for x in found if uncompiled(x.module) is model), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, or the model itself."""
    inner = uncompiled(model)
    return inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else model
