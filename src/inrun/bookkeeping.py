"""Small questions a run asks: which ids, which parameters, how much memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.errors import BatchError
from inrun.ops import Form


@dataclass(frozen=True)
class Config:
    """The choices of a run that its numbers depend on."""

    estimator: tuple[str, ...]
    point: str | None
    training: str
    audit_every: int
    per_step: int
    every: int
    batch_dim: int
    ignore: tuple[str, ...]
    form: Form
    seed: int


def as_ids(ids: Any, kind: type | None) -> tuple[np.ndarray, type]:
    """Ids as an array and their type, which must be the same in the whole run (``kind``)."""
    plain = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else list(ids)
    if not plain:
        raise BatchError("run.batch got no ids: pass one per example")
    kinds = {_kind(x) for x in plain} | ({kind} if kind else set())
    if not kinds <= {int, str} or len(kinds) > 1:
        found = ", ".join(sorted(k.__name__ for k in kinds))
        raise BatchError(
            "ids must be all integers or all strings, the same in the whole run, but here are "
            f"{found}"
        )
    kind = kinds.pop()
    return np.asarray(plain, dtype=np.int64 if kind is int else object), kind


def _kind(x: Any) -> type:
    if isinstance(x, str):
        return str
    return int if isinstance(x, (int, np.integer)) and not isinstance(x, bool) else type(x)


def free_memory(device: torch.device, offload: bool) -> int:
    """Bytes that can still be allocated where captures are kept."""
    if device.type == "cuda" and not offload:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**62


NOT_HELD = "not in the optimizer"
OUTSIDE = "outside the watched model"


class Unscored:
    """Parameters that the loss inside run.batch trains and that are not scored: of the model, but
    not in the optimizer, or of something else than the model (a criterion of its own)."""

    def __init__(self) -> None:
        self.outside: dict[str, tuple[Tensor, str]] = {}  # by a name, with the reason
        self._known: dict[int, Tensor] = {}

    def look(
        self,
        left_out: Mapping[str, tuple[Tensor, str]],
        outsiders: Iterable[Tensor],
        optimizer: Optimizer,
    ) -> bool:
        """After a batch: warn of those that have received a gradient for the first time."""
        found = []
        for name, (p, why) in left_out.items():
            if why == NOT_HELD and p.grad is not None and self._new(p):
                found.append(f"{name} {list(p.shape)} is {why}")
        for t in outsiders:
            if t.grad is not None and self._new(t):
                name = _held_names(optimizer).get(id(t), f"(outside {len(self.outside) + 1})")
                self.outside[name] = (t, OUTSIDE)
                found.append(f"{name} {list(t.shape)} is {OUTSIDE}")
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            warnings.warn(
                "the loss inside run.batch also trains parameters that are not scored: "
                f"{'; '.join(found[:5])}{more}. What examples do through them is in no value; "
                "run.coverage() lists them. To score them too, watch a module that contains them "
                "all, with one optimizer.",
                stacklevel=5,
            )
        return bool(found)

    def _new(self, p: Tensor) -> bool:
        if id(p) in self._known:
            return False
        self._known[id(p)] = p
        return True


class EmptyBatches:
    """Blocks that ended and recorded nothing. Without a backward pass the batch does not count (a
    loop skips those whose loss is not finite); with one it is a mistake."""

    def __init__(self) -> None:
        self.count = 0
        self._params: Mapping[str, Tensor] = {}
        self._before: list[tuple[Tensor, int]] = []

    def begun(self, params: Mapping[str, Tensor]) -> None:
        self._params, self._before = params, self._gradients(params)

    def ended(self, error: BatchError) -> None:
        now = self._gradients(self._params)
        if len(now) != len(self._before) or any(
            g is not old or version != before
            for (g, version), (old, before) in zip(now, self._before, strict=True)
        ):
            raise error
        self.count += 1
        if self.count == 1:
            warnings.warn(
                "a run.batch(ids) block ended without a backward(): the batch does not count. That "
                "is right for a batch that the loop skips; otherwise call loss.backward() inside "
                "the block. (Said once.)",
                stacklevel=7,
            )

    @staticmethod
    def _gradients(params: Mapping[str, Tensor]) -> list[tuple[Tensor, int]]:
        """What is in .grad, and how often it was written to."""
        return [(g, g._version) for p in params.values() if (g := p.grad) is not None]


def _held_names(optimizer: Optimizer) -> dict[int, str]:
    """The names of the parameters that an optimizer was given by name."""
    return {
        id(p): name
        for group in optimizer.param_groups
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def held_by(optimizer: Optimizer) -> frozenset[int]:
    """The ids of the parameters that it trains."""
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def scored_parameters(
    model: nn.Module, optimizer: Optimizer, ignore: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, str]]]:
    """The parameters to score by name, and the others with the reason they are left alone."""
    held = held_by(optimizer)
    named = {k.removeprefix("_orig_mod."): p for k, p in model.named_parameters()}
    unknown = [k for k in ignore if k not in named]
    if unknown:
        raise ValueError(f"ignore names parameters the model does not have: {unknown}")
    scored: dict[str, Tensor] = {}
    others: dict[str, tuple[Tensor, str]] = {}
    for name, p in named.items():
        if not p.requires_grad:
            others[name] = (p, "frozen")
        elif id(p) not in held:
            others[name] = (p, NOT_HELD)
        elif name in ignore:
            others[name] = (p, "ignored")
        else:
            scored[name] = p
    if not scored:
        raise ValueError(
            "no parameter of the model is both trainable and in the optimizer, so there is nothing "
            "to watch (was the optimizer made from another model, or before freezing?)"
        )
    return scored, others


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, in half the time."""
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [m for m in reversed(module._modules.values()) if m is not None]
    return list(found)


def trainable(modules: Sequence[nn.Module], optimizer: Optimizer) -> tuple[int, ...]:
    """Changes when a layer is frozen or unfrozen, or the optimizer gets more parameters."""
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    params = [p for m in modules for p in m._parameters.values() if p is not None]
    return (held, *(id(p) for p in params if p.requires_grad))


def coverage_table(
    scored: Mapping[str, Tensor],
    others: Mapping[str, tuple[Tensor, str]],
    seen: Mapping[str, set[tuple[str, str]]],
) -> pd.DataFrame:
    """One row per parameter; ``seen`` has the operations and forms by parameter."""
    rows = []
    for name, p in scored.items():
        uses = seen.get(name, set())
        operations, forms = (", ".join(sorted({use[i] for use in uses})) for i in (0, 1))
        status = "scored" if uses else "no gradient yet"
        rows.append((name, tuple(p.shape), p.numel(), status, operations, forms))
    rows += [(k, tuple(p.shape), p.numel(), why, "", "") for k, (p, why) in others.items()]
    columns = ["parameter", "shape", "size", "status", "operations", "forms"]
    return pd.DataFrame(rows, columns=columns)


def describe(model: nn.Module, optimizer: Optimizer, coverage: pd.DataFrame) -> dict[str, Any]:
    """What run.json says of a run."""
    scored = coverage.loc[coverage["status"] == "scored", "size"].sum()
    trained = coverage.loc[coverage["status"] != "frozen", "size"].sum()
    groups = [
        {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return {
        "model": {"class": type(model).__name__, "parameters": int(coverage["size"].sum())},
        "optimizer": {"class": type(optimizer).__name__, "groups": groups},
        "coverage": {
            "share": float(scored / trained) if trained else 0.0,
            "parameters": coverage.astype({"shape": str}).to_dict("records"),
        },
    }


def _plain(x: Any) -> Any:
    """A parameter group's option as JSON has it."""
    if isinstance(x, Tensor):
        return x.tolist()
    return x if isinstance(x, (bool, int, float, str, type(None))) else str(x)
