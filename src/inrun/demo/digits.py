"""Find flipped labels in scikit-learn's digits, then remove the suspects and train again."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import inrun
from inrun.demo import stage
from inrun.ledger import LedgerError
from inrun.ledger.audits import carry_summary
from inrun.report import metrics

EPOCHS = 20
BATCH = 64
LR = 5e-3
WIDTH = 32
FLIPPED = 0.1  # share of the training labels
VALIDATION, TEST = 300, 497  # of 1,797 images; 1,000 remain for training
RETRAINED = 3  # trainings per way of removing, each with a seed of its own
ESTIMATORS = ("secant", "tangent", "sgd")
WATCHED = (*ESTIMATORS, "carry")
RANKINGS = {
    "harm": "harm over the ten digits",
    "secant": "sum of secant values",
    "tangent": "sum of tangent values",
    "sgd": "sum of SGD values",
    "loss": "final training loss",
}


@dataclass(frozen=True)
class Data:
    """Images and labels; some labels of the training part are flipped."""

    x: Tensor
    y: Tensor
    flipped: np.ndarray
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(seed: int) -> Data:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise LedgerError("the digits come with scikit-learn: pip install 'inrun[demo]'") from None
    digits = datasets.load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    images = torch.tensor(digits.images[order] / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    labels = torch.tensor(digits.target[order])
    held = VALIDATION + TEST
    y = labels[held:].clone()
    flipped = np.zeros(len(y), bool)
    flipped[rng.choice(len(y), round(FLIPPED * len(y)), replace=False)] = True
    y[flipped] = (y[flipped] + torch.from_numpy(rng.integers(1, 10, flipped.sum()))) % 10
    return Data(
        images[held:],
        y,
        flipped,
        (images[:VALIDATION], labels[:VALIDATION]),
        (images[VALIDATION:held], labels[VALIDATION:held]),
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * WIDTH, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def batches(n: int, epochs: int) -> Iterable[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(n).split(BATCH)


def steps(n: int, epochs: int) -> int:
    return epochs * -(-n // BATCH)


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = network()
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def retrain(data: Data, keep: np.ndarray, seed: int, epochs: int) -> float:
    """Accuracy on the test images after training on some of the examples, not watched."""
    model, optimizer = make(seed)
    x, y = data.x[keep], data.y[keep]
    for rows in batches(len(x), epochs):
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return accuracy(model, data)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    x, y = data.test
    return float((model(x).argmax(1) == y).double().mean())


def val_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def watched(
    data: Data, out: Path | None, seed: int, epochs: int, console: Console
) -> tuple[inrun.Run, nn.Module]:
    """The training that everybody would do anyway, and what inrun saw of it."""
    model, optimizer = make(seed)
    run = inrun.watch(
        model,
        optimizer,
        targets=inrun.by_label(TensorDataset(*data.validation)),
        loss=val_loss,
        out=out,
        estimator=WATCHED,
        window=20,
        audit_every=10,
        seed=seed,
    )
    n = len(data.y)
    with run, stage.progress(console, "Training, watched", steps(n, epochs), run) as advance:
        for rows in batches(n, epochs):
            with run.batch(rows):
                F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            advance()
    return run, model


def rankings(data: Data, run: inrun.Run, model: nn.Module) -> dict[str, np.ndarray]:
    """Scores by which to suspect a label, higher is worse."""
    found = {"harm": run.harm()["harm"].to_numpy()}
    found |= {e: -run.values(e)["value"].to_numpy() for e in ESTIMATORS}
    with torch.no_grad():
        found["loss"] = F.cross_entropy(model(data.x), data.y, reduction="none").numpy()
    return found


def adds_up(run: inrun.Run) -> dict[str, float]:
    """Who is credited with the loss drop of the run: at the step itself, and through momentum."""
    found = carry_summary(run.steps("carry"))
    return {"one_step": float(run.values("secant")["value"].sum()), **found}


def one_seed(seed: int, epochs: int, out: Path | None, console: Console) -> dict[str, Any]:
    data = load(seed)
    run, model = watched(data, out, seed, epochs, console)
    scores = rankings(data, run, model)
    n, k = len(data.y), int(data.flipped.sum())
    suspects = np.argsort(-scores["harm"], kind="stable")[:k]
    rng = np.random.default_rng(seed)
    after: dict[str, list[float]] = {"all": [], "random": [], "harm": []}
    with stage.progress(console, "Training again", RETRAINED * len(after)) as advance:
        for r in range(RETRAINED):
            keep = {
                "all": np.arange(n),
                "random": np.sort(rng.permutation(n)[k:]),
                "harm": np.setdiff1d(np.arange(n), suspects),
            }
            for name, rows in keep.items():
                after[name].append(retrain(data, rows, 1000 + r, epochs))
                advance()
    if out is not None:
        group = np.where(data.flipped, "flipped label", "given label is right")
        np.savez_compressed(
            out / "examples.npz",
            id=np.arange(n),
            image=(255 * data.x[:, 0]).byte().numpy(),
            label=data.y.numpy(),
            group=group,
        )
    return {
        "seed": seed,
        "examples": n,
        "flipped": k,
        "steps": run.step,
        "accuracy": accuracy(model, data),
        "explained": run.tally.explained,
        "adds_up": adds_up(run),
        "auroc": {name: metrics.auroc(s, data.flipped) for name, s in scores.items()},
        "precision_at_k": {
            name: metrics.precision_at_k(s, data.flipped, k) for name, s in scores.items()
        },
        "accuracy_after": {name: float(np.mean(a)) for name, a in after.items()},
    }


def demo(out: Path, seeds: Sequence[int], epochs: int, console: Console) -> dict[str, Any]:
    """Everything: train, rank, remove, train again, show."""
    load(seeds[0])  # fails before a folder is touched if an extra is missing
    folder = stage.fresh(out)
    flips = f"{FLIPPED:.0%} of the labels of 1,000 training digits are flipped"
    console.print(f"[bold]inrun demo: digits[/]\n{flips}. Who finds them?\n")
    with stage.threads(1):
        found = [
            one_seed(seed, epochs, folder if seed == seeds[0] else None, console) for seed in seeds
        ]
    result: dict[str, Any] = {"task": "digits", "epochs": epochs, "mean": mean(found)}
    result |= {"seeds": found, "machine": stage.machine()}
    show(result, console)
    stage.finish(folder, folder / "examples.npz", result, console, "--by harm")
    return result


def mean(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds of every number."""
    first = found[0]
    return {
        key: mean([f[key] for f in found])
        if isinstance(value, dict)
        else float(np.mean([f[key] for f in found]))
        for key, value in first.items()
        if key != "seed"
    }


def show(result: dict[str, Any], console: Console) -> None:
    """What a person reads."""
    m, k, count = result["mean"], round(result["mean"]["flipped"]), len(result["seeds"])
    seeds = f", mean of {count} seeds" if count > 1 else ""
    find = stage.table("ranked by", "AUROC", f"flipped among the first {k}")
    for name, words in RANKINGS.items():
        row = (words, f"{m['auroc'][name]:.3f}", f"{m['precision_at_k'][name]:.0%}")
        find.add_row(*row, style="bold" if name == "harm" else "")
    stage.say(
        console,
        f"Finding the {k} flipped labels{seeds}",
        find,
        "The final loss is a strong rival until the model learns the wrong labels by\n"
        "heart. A value also says how much an example helped, and on which digit.",
    )
    share, a = f"{FLIPPED:.0%}", m["accuracy_after"]
    after = stage.table("trained on", "accuracy")
    after.add_row("everything", f"{a['all']:.1%}")
    after.add_row(f"all but a random {share}", f"{a['random']:.1%}")
    after.add_row(f"all but the {share} of most harm", f"{a['harm']:.1%}", style="bold")
    stage.say(
        console,
        f"Removing suspects and training again, {TEST} test digits",
        after,
        f"Each the mean of {RETRAINED * count} trainings. The watched training itself: "
        f"{m['accuracy']:.1%}; its values\nexplain {m['explained']:.1%} of what the batches did "
        "to the validation loss.",
    )
    show_sums(m["adds_up"], console)


def show_sums(c: dict[str, float], console: Console) -> None:
    """Does everything add up?"""
    sums = stage.table("loss drop of the watched training", f"{c['drop']:.3f}")
    sums.add_row("credited at the step itself (secant)", f"{c['one_step']:.3f}")
    sums.add_row("credited with what momentum carries on (carry)", f"{c['credited']:.3f}")
    sums.add_row("weight decay", f"{c['decay']:.3f}")
    sums.add_row("older than the window, nobody's", f"{c['older']:.3f}")
    stage.say(
        console,
        "Does everything add up?",
        sums,
        "The last three make the whole drop. inrun info --estimator carry says more.",
    )
