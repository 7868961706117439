"""One part: every detector's scores (higher is more suspicious), how good they are, what they cost.

Wall-clock is measured in this process (with ``timed`` in the settings); ``counted`` is the same
from the number of passes, a backward pass being two forward ones. Both are multiples of one
training and come on top of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common.parts import Context, Settings, packed
from experiments.mislabel import problems
from experiments.mislabel.training import Trainer, copy_of, taken
from inrun.report.metrics import auroc, precision_at_k

ESTIMATORS = ["secant", "tangent", "sgd"]
WARM = 4  # steps before the clock runs: by then passes are checked and recorded


def measure(settings: Settings, context: Context) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    problem = problems.make(settings, context)
    trainer = Trainer(problem, settings, context)
    scores, seconds, cost = {}, {}, {}
    found: dict[str, Any] = {}
    stages = [inrun_values, along_the_run, early, out_of_fold]
    for i in context.track(len(stages)):
        found |= stages[i](trainer)
        scores |= found.pop("scores")
        seconds |= found.pop("seconds", {})
        cost |= found.pop("cost", {})
    training = seconds.pop("training")
    if settings["timed"]:
        cost |= {name: t / training for name, t in seconds.items()}
    k = int(problem.flipped.sum())
    return {
        "task": problem.name, "recipe": settings["recipe"], "rate": settings["rate"],
        "seed": settings["seed"], "examples": problem.examples, "flips": k,
        "classes": problem.classes, "steps": trainer.steps,
        "accuracy": accuracy(trainer, scores.pop("final weights")),
        "detectors": {
            name: {
                "auroc": round(auroc(s, problem.flipped), 5),
                "precision": round(precision_at_k(s, problem.flipped, k), 5),
            }
            for name, s in scores.items()
        },
        "training_seconds": round(training, 3),
        "cost": {name: round(x, 4) for name, x in cost.items()},
        "counted": {name: round(x, 4) for name, x in counted(trainer).items()},
        "labels": "".join(map(str, problem.train[1].tolist())),
        "flipped": np.flatnonzero(problem.flipped).tolist(),
        "probabilities": packed(found["probabilities"]), "void": found["void"],
    }  # fmt: skip


def inrun_values(trainer: Trainer) -> dict[str, Any]:
    """Sums of in-run values, and harm over one target per label, from one watched run."""
    run = None
    for _, _, run in trainer.run(ESTIMATORS):  # noqa: B007
        pass
    assert run is not None
    scores = {e: -run.values(e)["value"].to_numpy() for e in ESTIMATORS}
    scores |= {f"harm, {e}": run.harm(e)["harm"].to_numpy() for e in ESTIMATORS}
    void = int(run.steps()["void"].notna().sum())
    cost = watching(trainer) if trainer.settings["timed"] else {}
    return {"scores": scores, "cost": cost, "void": void}


def watching(trainer: Trainer) -> dict[str, float]:
    """What watching adds to a training, in multiples of it: one validation target for sums of
    values, one per label for harm. Rounds take turns with plain steps: a busy machine slows all
    alike."""
    sums, harm = ({f"{kind}{e}": ((e,), bool(kind)) for e in ESTIMATORS} for kind in ("", "harm, "))
    kinds = {"plain": ((), False), **sums, **harm}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    timed = trainer.settings["timed"]
    for _ in range(trainer.settings["rounds"]):
        for name, (estimators, by_label) in kinds.items():
            start = 0.0
            for step, _, _ in trainer.run(estimators, WARM + timed, by_label):
                if step == WARM:
                    start = trainer.clock()
            seconds[name].append((trainer.clock() - start) / timed)
    median = {name: float(np.median(s)) for name, s in seconds.items()}
    plain = median.pop("plain")
    return {name: s / plain - 1 for name, s in median.items()}


def along_the_run(trainer: Trainer) -> dict[str, Any]:
    """What a plain training's checkpoints say: losses and TracIn (with the validation set, and of
    an example with itself)."""
    s, per_epoch = trainer.settings, trainer.per_epoch
    epochs, start = [], trainer.clock()
    for step, model, _ in trainer.run():
        if step % per_epoch == 0:
            epochs.append(taken(model))
    seconds = {"training": trainer.clock() - start}

    start = trainer.clock()
    losses = torch.stack([trainer.losses(w) for w in epochs]).cpu().numpy()
    seconds["loss, mean over epochs"] = trainer.clock() - start
    seconds["loss, end"] = seconds["loss, mean over epochs"] / len(epochs)

    chosen = checkpoints(s)
    trainer.alignment(epochs[0], epochs[0], first=2)  # loads what forward derivatives need
    start = trainer.clock()
    helped = sum(
        trainer.rate((c + 1) * per_epoch - 1)
        * trainer.alignment(epochs[c], trainer.validation_gradient(epochs[c]))
        for c in chosen
    )
    seconds["TracIn"] = trainer.clock() - start
    start = trainer.clock()
    own = sum(
        trainer.rate((c + 1) * per_epoch - 1) * trainer.norms(epochs[c]).square() for c in chosen
    )
    seconds["TracIn, self-influence"] = trainer.clock() - start
    assert isinstance(helped, Tensor) and isinstance(own, Tensor)
    scores = {
        "loss, end": losses[-1], "loss, mean over epochs": losses.mean(0),
        "TracIn": -helped.cpu().numpy(), "TracIn, self-influence": own.cpu().numpy(),
        "final weights": epochs[-1],
    }  # fmt: skip
    return {"scores": scores, "seconds": seconds}


def checkpoints(settings: Settings) -> list[int]:
    """The epochs after which TracIn looks: so many, evenly spaced, the last one among them."""
    n = min(settings["checkpoints"], settings["epochs"])
    return [round((i + 1) * settings["epochs"] / n) - 1 for i in range(n)]


def early(trainer: Trainer) -> dict[str, Any]:
    """EL2N and GraNd (Paul et al. 2021) early in training, means over seeds."""
    s, problem = trainer.settings, trainer.problem
    seeds = [s["seed"] + 100 + i for i in range(s["early_seeds"])]
    trainer.load(seeds)
    start = trainer.clock()
    everything = np.arange(problem.examples)
    stack = trainer.side_by_side(
        seeds, [trainer.order(everything, seed) for seed in seeds], s["early"] * trainer.per_epoch
    )
    trained, start = trainer.clock() - start, trainer.clock()
    x, y = problem.train
    right = torch.nn.functional.one_hot(y, problem.classes)
    copies = [copy_of(stack, i) for i in range(len(seeds))]
    el2n = torch.stack([(trainer.logits(w, x).softmax(1) - right).norm(dim=1) for w in copies])
    seconds = {"EL2N": trained + trainer.clock() - start}
    start = trainer.clock()
    grand = torch.stack([trainer.norms(w) for w in copies])
    seconds["GraNd"] = trained + trainer.clock() - start
    scores = {"EL2N": el2n.mean(0).cpu().numpy(), "GraNd": grand.mean(0).cpu().numpy()}
    return {"scores": scores, "seconds": seconds}


def out_of_fold(trainer: Trainer) -> dict[str, Any]:
    """Each example's class probabilities from a training that did not see it, for confident
    learning; its scores are made of them in the summary."""
    s, problem = trainer.settings, trainer.problem
    shuffled = np.random.default_rng(s["seed"]).permutation(problem.examples)
    folds = [np.sort(f) for f in np.array_split(shuffled, s["folds"])]
    if len({len(f) for f in folds}) > 1:
        raise ValueError(f"{problem.examples} examples do not split into {s['folds']} equal folds")
    others = [np.setdiff1d(shuffled, f) for f in folds]
    seeds = [s["seed"] + 200 + i for i in range(len(folds))]
    trainer.load(seeds)
    start = trainer.clock()
    orders = [trainer.order(ids, seed) for ids, seed in zip(others, seeds, strict=True)]
    stack = trainer.side_by_side(seeds, orders, len(orders[0]))
    found = np.zeros((problem.examples, problem.classes))
    for i, fold in enumerate(folds):
        x, _ = trainer.rows(torch.from_numpy(fold))
        found[fold] = trainer.logits(copy_of(stack, i), x).softmax(1).cpu().numpy()
    seconds = {"confident learning": trainer.clock() - start}
    return {"scores": {}, "seconds": seconds, "probabilities": found}


def counted(trainer: Trainer) -> dict[str, float]:
    """Passes over examples beyond the training, as multiples of its own.

    A watched step adds a pass over its validation rows and a third of its own products (at most:
    per-example gradients beside the layer's own).
    """
    s, problem = trainer.settings, trainer.problem
    watched = problem.classes * s["rows"] / s["batch"] + 1 / 3
    forward, n = 1 / (3 * s["epochs"]), len(checkpoints(s))
    begun = s["early"] / s["epochs"]
    validation = len(problem.validation[1]) / problem.examples
    return {
        **{f"{kind}{e}": watched for kind in ("", "harm, ") for e in ESTIMATORS},
        "loss, end": forward,
        "loss, mean over epochs": s["epochs"] * forward,
        "TracIn": n * (2 + 3 * validation) * forward,
        "TracIn, self-influence": n * 3 * forward,
        "EL2N": s["early_seeds"] * (begun + forward),
        "GraNd": s["early_seeds"] * (begun + 3 * forward),
        "confident learning": s["folds"] - 1 + forward,
    }


def accuracy(trainer: Trainer, weights: Any) -> float:
    """On held-out examples with right labels."""
    x, y = trainer.problem.test
    return round(float((trainer.logits(weights, x).argmax(1) == y).double().mean()), 5)
