"""Small questions a run asks: which ids, which parameters, how much memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.errors import BatchError, complex_parameters
from inrun.gradients import Form
from inrun.run.refusals import ignored
from inrun.torch_compat import COMPILED_PREFIX, children_of, parameters_of


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
    """Ids as an array and their type, which must be the same in the whole run (``kind``).

    Integers fit into 64 bits with a sign (int64), strings can be written as UTF-8: what comes out
    of the tables is what went in.
    """
    whole = _integers(ids)
    if whole is not None and kind is not str:
        return whole, int
    plain = _as_list(ids)
    if not plain:
        raise BatchError("run.batch got no ids: pass one per example")
    found: list[int] | list[str] = [_id(x, i, len(plain)) for i, x in enumerate(plain)]
    kinds: dict[type, int] = {}  # and where each occurs first
    for i, x in enumerate(found):
        kinds.setdefault(type(x), i)
    if len(kinds) > 1 or (kind is not None and kind not in kinds):
        here = ", ".join(f"{k.__name__} at position {i}" for k, i in kinds.items())
        before = "" if kind is None else f", and {kind.__name__} in the batches before"
        raise BatchError(
            "ids must be all integers or all strings, the same in the whole run, but here are "
            f"{here}{before}. Make them all strings with str(id)"
        )
    kind = type(found[0])
    kept = np.empty(len(found), dtype=np.int64 if kind is int else object)
    kept[:] = found
    return kept, kind


def _integers(ids: Any) -> np.ndarray | None:
    """A row of integers that fit whatever they are: the usual case, without a loop."""
    if isinstance(ids, Tensor) and str(ids.dtype).startswith(("torch.int", "torch.uint")):
        ids = ids.cpu().numpy()
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not len(ids):
        return None
    fits = ids.dtype.kind == "i" or (ids.dtype.kind == "u" and ids.dtype.itemsize < 8)
    return ids.astype(np.int64) if fits else None


def _as_list(ids: Any) -> list[Any]:
    """One entry per example, in the order given."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise BatchError(
            f"run.batch got {ids!r}, a single {type(ids).__name__}: pass a list of ids, one per "
            "example"
        )
    if isinstance(ids, (Mapping, Set)):
        raise BatchError(
            f"run.batch got ids in a {type(ids).__name__}, which does not say which id is whose: "
            "pass a list, one per example, in the order of the batch"
        )
    if isinstance(ids, (Tensor, np.ndarray)):
        if ids.ndim != 1:
            raise BatchError(
                f"run.batch got ids of shape {tuple(ids.shape)}: pass one per example, shape [B]"
            )
        return ids.tolist()
    return [x.item() if isinstance(x, Tensor) and x.ndim == 0 else x for x in ids]


def _id(x: Any, position: int, n: int) -> Any:
    """An id as the ledger keeps it: a plain int or str."""
    if isinstance(x, str):
        text = str.__str__(x)  # of a subclass (numpy's, an enum's): its characters
        if text.isascii() or _encodable(text):
            return text
        problem = f"is {text!r}, half a surrogate pair, which no file can hold: mend the text it "
        problem += "was read from (errors='replace'), or number the examples"
    elif isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        number = int(x)
        if -(2**63) <= number < 2**63:
            return number
        problem = f"is {number}, which does not fit into 64 bits with a sign: pass such ids as "
        problem += "strings, str(id), in the whole run"
    else:
        problem = f"is {x!r} ({type(x).__name__}). Ids are integers or strings: "
        if isinstance(x, bytes):
            problem += "decode it, id.decode()"
        elif x is None or (pd.api.types.is_scalar(x) and pd.isna(x)):
            problem += "every example needs an id of its own; leave out rows without one, or name "
            problem += "them"
        else:
            problem += "make it an integer, int(id), or a string, str(id)"
    raise BatchError(f"the id at position {position} of {n} {problem}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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

    def ended(self, error: BatchError, backward: bool) -> None:
        """``backward``: one ran in the block."""
        if backward:
            raise error
        self.count += 1
        if self.count == 1:
            warnings.warn(
                "a run.batch(ids) block ended without a backward(): the batch does not count. That "
                "is right for a batch that the loop skips; otherwise call loss.backward() inside "
                "the block. (Said once.)",
                stacklevel=7,
            )


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
    named = {k.removeprefix(COMPILED_PREFIX): p for k, p in model.named_parameters()}
    _refuse_complex(named, optimizer)
    left_out = ignored(ignore, list(named), _shared(model, named)) if ignore else set()
    scored: dict[str, Tensor] = {}
    others: dict[str, tuple[Tensor, str]] = {}
    for name, p in named.items():
        if not p.requires_grad:
            others[name] = (p, "frozen")
        elif id(p) not in held:
            others[name] = (p, NOT_HELD)
        elif name in left_out:
            others[name] = (p, "ignored")
        else:
            scored[name] = p
    if not scored and any(why == "ignored" for _, why in others.values()):
        raise ValueError(
            f"ignore={list(ignore)} leaves no trainable parameter, so there is nothing to watch"
        )
    if not scored:
        raise ValueError(
            "no parameter of the model is both trainable and in the optimizer, so there is nothing "
            "to watch (was the optimizer made from another model, or before freezing?)"
        )
    return scored, others


def _shared(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of parameters that occur more than once in the model → the name in use."""
    first = {id(p): name for name, p in named.items()}
    every = model.named_parameters(remove_duplicate=False)
    names = {name.removeprefix(COMPILED_PREFIX): first[id(p)] for name, p in every}
    return {name: used for name, used in names.items() if name != used}


def _refuse_complex(named: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Also those that are ignored: the step moves them, so the midpoint has to."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p for p in params if p.requires_grad and p.is_complex()]
    if found:
        names = {id(p): k for k, p in named.items()}
        raise complex_parameters([names.get(id(p), "(outside the model)") for p in found])


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, in half the time."""
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [m for m in reversed(children_of(module).values()) if m is not None]
    return list(found)


def trainable(modules: Sequence[nn.Module], optimizer: Optimizer) -> tuple[int, ...]:
    """Changes when a layer is frozen or unfrozen, or the optimizer gets more parameters."""
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    params = [p for own in map(parameters_of, modules) for p in own.values() if p is not None]
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
