"""Checks of the arguments of ``watch``. Each error names the cause and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from inrun.errors import ValidationError
from inrun.optimizers import rule_for
from inrun.optimizers.joint import Joint, Optimizers
from inrun.ranks.torch_compat import has_mixed_precision
from inrun.ranks.world import unwrapped
from inrun.run.sharding import check_shards
from inrun.scoring.estimators import Estimator

WAYS_OUT = (
    "inrun watches one process, and several with DistributedDataParallel or fully_shard "
    "(docs/distributed.md): train the model with one of these"
)


def check_model(model: Any) -> None:
    """Refuse what is no module, and modules whose gradients or weights lie in many processes, each
    a part of them. DistributedDataParallel is fine, around the whole model."""
    if isinstance(model, Optimizer):
        raise TypeError("watch got the optimizer first: call watch(model, optimizer, ...)")
    if any(c.__module__.startswith("torch.distributed.pipelining") for c in type(model).__mro__):
        raise TypeError(
            f"{type(model).__name__} is pipeline parallelism: each process has some of the layers "
            f"and none has the validation loss of the whole model. {WAYS_OUT}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch needs the model as a torch.nn.Module, not a {type(model).__name__}")
    whole = unwrapped(model)
    for name, module in model.named_modules():
        why = _in_parts(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            why = _unlike_the_whole(module, around=module.module is whole)
        if why:
            raise TypeError(f"its part '{name}': {why}" if name else why)
    check_shards(model)


def _unlike_the_whole(ddp: nn.parallel.DistributedDataParallel, around: bool) -> str | None:
    """Why this DistributedDataParallel cannot be watched. ``around``: it wraps the whole model."""
    if torch.distributed.get_world_size(ddp.process_group) == 1:
        return None
    if not around:
        return (
            "DistributedDataParallel around a part of the model averages the gradients of that "
            "part only. Wrap the whole model in it and pass that to watch"
        )
    if has_mixed_precision(ddp):
        return (
            "DistributedDataParallel(mixed_precision=...) trains on low-precision copies of the "
            "parameters, which the capture does not see. Use torch.autocast instead"
        )
    held = {n for n, p in ddp.module.named_parameters() if p.requires_grad}
    if alone := sorted(held & set(ddp.parameters_to_ignore)):
        return (
            f"DistributedDataParallel leaves out {', '.join(alone[:5])}, so each rank trains a "
            "copy of its own. Freeze these parameters, or have them averaged"
        )
    return None


def _in_parts(module: nn.Module) -> str | None:
    """Why this module cannot be watched, if it spreads the training over processes or devices."""
    names = {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(module).__mro__}
    if names & {"deepspeed.DeepSpeedEngine", "deepspeed.PipelineEngine"}:
        return (
            "a DeepSpeed engine keeps gradients and optimizer state for itself, in parts and "
            "buffers of its own, and steps by engine.step(): what the optimizer receives cannot "
            f"be seen. {WAYS_OUT} (engine.module)"
        )
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return (
            f"DataParallel runs copies of the model on {len(module.device_ids)} devices, in "
            "threads, each with a part of the batch: their operations cannot be seen. Train on "
            "one device, on the model itself (model.module)"
        )
    if isinstance(module, nn.SyncBatchNorm) and module.training and _several(module.process_group):
        return (
            "SyncBatchNorm takes its statistics over the examples of all ranks, in an autograd "
            "function of its own that the capture does not see. Use GroupNorm, or BatchNorm, whose "
            "statistics are those of each rank's examples; or put it into eval() mode"
        )
    if "torch.FullyShardedDataParallel" in names:
        return (
            "FullyShardedDataParallel flattens the parameters and spreads them over processes: "
            "no parameter is left to be named. Use fully_shard (FSDP2) instead "
            "(docs/distributed.md)"
        )
    return None


def _several(group: Any) -> bool:
    """Has this process group (None: the default one) more than one process?"""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def check_optimizers(optimizer: Any, model: nn.Module, together: bool, every: int) -> Optimizers:
    """The optimizers to watch: one, or several as one. Refuses what has no rule, and what does not
    fit together."""
    if isinstance(optimizer, Mapping):
        raise TypeError(
            "watch takes an optimizer or a list of them, not a "
            f"{type(optimizer).__name__}: pass list(optimizers.values())"
        )
    members = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not members:
        raise TypeError("watch got an empty list of optimizers")
    for member in members:
        _check_optimizer(member)
    _refuse_in_backward(model)
    _refuse_twice(members, model)
    if not together and len(members) > 1 and every > 1:
        raise ValueError(
            f"every={every} draws steps by chance, and with step_together=False one batch belongs "
            "to several steps: pass every=1, or let the optimizers step together"
        )
    return members[0] if len(members) == 1 else Joint(members)


def _refuse_twice(members: Sequence[Optimizer], model: nn.Module) -> None:
    """No parameter may be moved by two optimizers."""
    first: dict[int, int] = {}
    for i, optimizer in enumerate(members):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if first.setdefault(id(p), i) != i:
                name = next((k for k, own in model.named_parameters() if own is p), "(no name)")
                raise ValueError(
                    f"parameter {name} is in two of the optimizers ({first[id(p)] + 1} and "
                    f"{i + 1}): each would move it. Give each parameter to one optimizer"
                )


def _refuse_in_backward(model: nn.Module) -> None:
    """Refuse parameters whose optimizer steps during the backward pass."""
    for name, p in model.named_parameters():
        if hasattr(p, "_in_backward_optimizers"):  # set by torch's _apply_optimizer_in_backward
            raise TypeError(
                f"parameter {name} has an optimizer that steps during backward() "
                "(_apply_optimizer_in_backward): it moves weights before all gradients of the "
                "batch are known, so no coalition of the batch has a step. Step after backward()"
            )


def _check_optimizer(optimizer: Any) -> None:
    """Refuse what has no rule; wrappers are told apart from unknown optimizers."""
    if isinstance(optimizer, nn.Module):
        raise TypeError("watch got a module as the optimizer: call watch(model, optimizer, ...)")
    inner = getattr(optimizer, "optimizer", None)
    kind = type(optimizer).__name__
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        raise TypeError(
            f"{kind} is DeepSpeed's: it keeps gradients and optimizer state in parts and buffers "
            f"of its own, so what it receives cannot be seen. {WAYS_OUT}, with an optimizer of "
            "torch"
        )
    if kind == "ZeroRedundancyOptimizer":
        raise TypeError(
            "ZeroRedundancyOptimizer steps a part of the parameters on each rank and sends the "
            "rest of the weights around inside step(): no rank has the state of all of them. Use "
            f"the optimizer that it wraps ({getattr(optimizer, '_optim_constructor', 'AdamW')!r}) "
            "with DistributedDataParallel, or fully_shard, which spreads the state as well"
        )
    if isinstance(inner, Optimizer):
        try:
            rule_for(optimizer)  # it may have a rule of its own
            return
        except TypeError:
            raise TypeError(
                f"the optimizer is wrapped, {kind} around {type(inner).__name__}, and inrun must "
                f"see the step of the {type(inner).__name__} itself: pass optimizer.optimizer to "
                f"watch and go on calling the {kind} in the training loop. (If it changes the "
                "update rather than pass it on, it needs a rule: @inrun.register_optimizer)"
            ) from None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"watch needs a torch.optim.Optimizer, not a {kind}")
    rule_for(optimizer)


def named_targets(
    validation: Iterable[Any] | None, targets: Mapping[str, Iterable[Any]] | None
) -> dict[str, Iterable[Any]]:
    """The validation data by target name; names are text that a file can hold."""
    if (validation is None) == (targets is None):
        raise ValidationError("pass either validation= (one target) or targets= (several by name)")
    if targets is None:
        assert validation is not None
        return {"validation": validation}
    if not isinstance(targets, Mapping):
        raise ValidationError(
            f"targets= takes a dictionary, name → validation data, not a {type(targets).__name__}; "
            "one target without a name is validation="
        )
    named: dict[str, Iterable[Any]] = {}
    for key, data in targets.items():
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ValidationError(f"the target name {key!r} is a {type(key).__name__}: use strings")
        name = str.__str__(key) if isinstance(key, str) else str(key)
        if not name.strip():
            raise ValidationError(f"a target has an empty name ({name!r}): every one needs a name")
        if name.encode("utf-8", "replace").decode() != name:
            raise ValidationError(
                f"the target name {name!r} holds half a surrogate pair, which no file can hold"
            )
        if name in named:
            raise ValidationError(f"targets need different names, but two are called {name!r}")
        named[name] = data
    return named


def check_choices(
    training: str, form: str, per_step: int | str | None, every: int, smooth: float,
    halves_every: int,
) -> None:  # fmt: skip
    """Refuse values of these arguments of ``watch`` that mean nothing."""
    if training not in ("bitwise", "fast"):
        raise ValueError(f"training={training!r} is not known: use 'bitwise' or 'fast'")
    if form not in ("auto", "ghost", "materialise"):
        raise ValueError(f"form={form!r} is not known: use 'auto', 'ghost' or 'materialise'")
    if isinstance(per_step, str) and per_step != "all":
        raise ValueError(f"per_step={per_step!r} is not known: use a number, 'all' or None")
    for name, number in (("per_step", per_step), ("every", every)):
        if isinstance(number, int) and number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if halves_every < 0:
        raise ValueError(f"halves_every={halves_every} must be a number of steps, or 0 for never")
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth={smooth} must be at least 0 and below 1: the share that is kept")


def check_estimators(estimator: str | Sequence[str], point: str | None) -> tuple[str, ...]:
    """The estimators' names: at least one, no two that mean the same."""
    names = (estimator,) if isinstance(estimator, str) else tuple(estimator)
    if not names:
        raise ValueError("estimator=[] records nothing: name at least one, as 'secant'")
    meaning: dict[Estimator, str] = {}
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"estimator {name!r} is a {type(name).__name__}: use strings")
        if name.endswith("+"):
            raise ValueError(f"estimator {name!r} names no point after the plus")
        found = Estimator.parse(name, point)
        same = meaning.setdefault(replace(found, name=""), name)
        if same is not name or names.count(name) > 1:
            raise ValueError(
                f"the estimators {same!r} and {name!r} are the same ({found.kind} at the "
                f"{found.point} point): name each once"
            )
    return names


def ignored(patterns: Sequence[str], names: Sequence[str], shared: Mapping[str, str]) -> set[str]:
    """The parameter names that ``ignore=`` means: names, or patterns such as ``"encoder.*"``.

    ``shared`` has the further names of parameters that occur more than once in the model.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [n for n in names if n == pattern] or [n for n in names if fnmatchcase(n, pattern)]
        if not hits:
            raise ValueError(_matches_nothing(str(pattern), names, shared))
        found.update(hits)
    return found


def _matches_nothing(pattern: str, names: Sequence[str], shared: Mapping[str, str]) -> str:
    message = f"ignore names parameters the model does not have: {pattern!r}"
    also = next((n for n in shared if n == pattern or fnmatchcase(n, pattern)), None)
    if also is not None:
        return f"{message}. {also} is the same parameter as {shared[also]}: name it so"
    inside = [n for n in names if n.startswith(pattern + ".")]
    if inside:
        return f"{message}. It is a module; for all of its parameters write '{pattern}.*'"
    near = difflib.get_close_matches(pattern, names, 3, 0.4) or list(names[:3])
    return f"{message}. Near names: {', '.join(near)} (run.coverage() has all)"
