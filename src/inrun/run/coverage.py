"""Which parameters of a model are scored, and the tables that say so."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import pandas as pd
from torch import Tensor, nn

from inrun.errors import complex_parameters
from inrun.optimizers.joint import Optimizers, members_of, name_of
from inrun.run.refusals import ignored
from inrun.torch_compat import COMPILED_PREFIX, children_of, parameters_of
from inrun.validation.identity import same

NOT_HELD = "not in the optimizer"
OUTSIDE = "outside the watched model"


def held_names(optimizer: Optimizers) -> dict[int, str]:
    """The names of the parameters that an optimizer was given by name."""
    return {
        id(p): name
        for group in optimizer.param_groups
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def held_by(optimizer: Optimizers) -> frozenset[int]:
    """``id(p)`` of each parameter that the optimizer trains."""
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def scored_parameters(
    model: nn.Module, optimizer: Optimizers, ignore: Sequence[str]
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


def _refuse_complex(named: Mapping[str, Tensor], optimizer: Optimizers) -> None:
    """Refuse complex parameters, ignored ones too: the midpoint needs every update."""
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


class ModuleTree:
    """All modules of a model, looked for again when one has got other children."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: list[nn.Module] = []
        self._stores: list[Any] = []  # where each module has its children,
        self._children: list[Any] = []  # and all of them

    def modules(self) -> list[nn.Module]:
        stores = list(map(children_of, self._found))
        if not stores or not same(stores, self._stores) or not same(_all(stores), self._children):
            self._found = modules_of(self._model)
            self._stores = list(map(children_of, self._found))
            self._children = _all(self._stores)
        return self._found


def _all(stores: Sequence[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable([x.values() for x in stores if x]))


def trainable(modules: Sequence[nn.Module], optimizer: Optimizers) -> tuple[int, ...]:
    """A key that changes when layers are frozen or unfrozen or the optimizer gets parameters."""
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    params = _all(list(map(parameters_of, modules)))
    return (held, *[id(p) for p in params if p is not None and p.requires_grad])


class UnscoredParameters:
    """Parameters that receive gradients inside run.batch and are not scored: those of the model
    that are not in the optimizer, and those outside the model (of a criterion, say)."""

    def __init__(self) -> None:
        self.outside: dict[str, tuple[Tensor, str]] = {}  # by name, with the reason
        self._known: dict[int, Tensor] = {}

    def look(
        self,
        left_out: Mapping[str, tuple[Tensor, str]],
        outsiders: Iterable[Tensor],
        optimizer: Optimizers,
    ) -> bool:
        """After a batch: warn of those that have a gradient for the first time; were there any?"""
        found = []
        for name, (p, why) in left_out.items():
            if why == NOT_HELD and p.grad is not None and self._new(p):
                found.append(f"{name} {list(p.shape)} is {why}")
        for t in outsiders:
            if t.grad is not None and self._new(t):
                name = held_names(optimizer).get(id(t), f"(outside {len(self.outside) + 1})")
                self.outside[name] = (t, OUTSIDE)
                found.append(f"{name} {list(t.shape)} is {OUTSIDE}")
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            warnings.warn(
                "the loss inside run.batch also trains parameters that are not scored: "
                f"{'; '.join(found[:5])}{more}. What examples do through them is in no value; "
                "run.coverage() lists them. To score them too, watch a module that contains them "
                "all, with all of their optimizers in a list.",
                stacklevel=5,
            )
        return bool(found)

    def _new(self, p: Tensor) -> bool:
        if id(p) in self._known:
            return False
        self._known[id(p)] = p
        return True


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


def describe(model: nn.Module, optimizer: Optimizers, coverage: pd.DataFrame) -> dict[str, Any]:
    """The description of a run that goes into run.json."""
    scored = coverage.loc[coverage["status"] == "scored", "size"].sum()
    trained = coverage.loc[coverage["status"] != "frozen", "size"].sum()
    several = len(members_of(optimizer)) > 1
    groups = [
        ({"optimizer": type(o).__name__} if several else {})
        | {k: _option_as_json(v) for k, v in group.items() if k not in ("params", "param_names")}
        for o in members_of(optimizer)
        for group in o.param_groups
    ]
    return {
        "model": {"class": type(model).__name__, "parameters": int(coverage["size"].sum())},
        "optimizer": {"class": name_of(optimizer), "groups": groups},
        "coverage": {
            "share": float(scored / trained) if trained else 0.0,
            "parameters": coverage.astype({"shape": str}).to_dict("records"),
        },
    }


def _option_as_json(x: Any) -> Any:
    """An option of a parameter group as a JSON value."""
    if isinstance(x, Tensor):
        return x.tolist()
    return x if isinstance(x, (bool, int, float, str, type(None))) else str(x)
