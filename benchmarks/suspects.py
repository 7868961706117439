"""Who finds wrong labels, and what may be removed? AUROC and retrained accuracy, in one file.

    python benchmarks/suspects.py [--tasks digits,letters,text] [--seeds 10-12] [--data DIR]
                                  [--model DIR] [--device cuda] [--examples N] [--epochs N]
                                  [--length N] [--no-prune] [--trainings N] [--cheap]
                                  [--ledgers DIR] [--out FILE.json] [--add [--anew]]

Tasks (``digits-8``: with 8 epochs only): scikit-learn's digits; letters that matplotlib's fonts
draw, 16 × 16, turned, shifted and noisy (Pillow); SST-2 from --data (sst2/train.tsv, sst2/dev.tsv)
with MiniLM from --model, from --data (minilm-l6) or its package; ``last-layer``: the same with the
last layer and the head alone trained, for a CPU. Labels are changed

    uniform     a tenth, to any other label
    one-sided   three tenths of one label, to one other label
    confusions  a tenth, each label to one that is its own (two labels: the same as uniform)

Ours is ``run.suspects()`` of one watched run. Single-run rivals are made of the same run: mean
loss, AUM (mean margin), loss at the end, EL2N of all visits, harm, sum of values. Others train or
look again: EL2N and GraNd of several short trainings, TracIn, confident learning from out-of-fold
probabilities. The rule of ``run.suspects()`` was chosen on seeds 0 to 3 of digits, letters and the
last layer, and before on seeds below 78, that of removing on seeds 0 to 7; results are of seeds 80
to 99: measure on others.
Beside it, its confidence and the share of wrong labels among as many examples. Removing: accuracy
on clean held-out examples after training on what is left, minus that of as many removed at random.
``--ledgers`` keeps what was recorded; a run that is there already is not trained again. ``--add``
adds to the cells that --out has: those measured again are replaced. ``--anew``: what was removed in
cells of the same tasks and kinds goes, since it was by another rule.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import inrun
from experiments.common import encoder, tasks
from experiments.common.parts import Context
from experiments.mislabel import detectors, problems
from experiments.mislabel.problems import Problem
from experiments.mislabel.training import Trainer, taken
from inrun.bench.machine import commit, hardware, versions
from inrun.ledger.suspects import SURE, removed
from inrun.report.metrics import auroc

KINDS = ("uniform", "one-sided", "confusions", "clean")
SINGLE = ("loss, mean", "AUM", "loss, end", "EL2N, all visits", "harm", "sum of values")
FIRST = (20, 50, 100, 200)  # suspects
RANDOM = 3  # sets of examples removed at random
COMMON = {"folds": 5, "checkpoints": 5, "rate": 0.0, "timed": 0, "warmup": 0, "early_seeds": 5}
TASKS: dict[str, dict[str, Any]] = {
    "digits, 8 epochs": {"examples": 1000, "channels": 16, "each": 24, "rows": 8, "epochs": 8,
                         "batch": 50, "lr": 3e-3, "early": 2},
    "digits, 20 epochs": {"examples": 1000, "channels": 16, "each": 24, "rows": 8, "epochs": 20,
                          "batch": 50, "lr": 5e-3, "early": 2},
    "letters, 8 epochs": {"examples": 2000, "each": 8, "rows": 4, "epochs": 8, "batch": 50,
                          "lr": 3e-3, "early": 2},
    "letters, 20 epochs": {"examples": 2000, "each": 8, "rows": 4, "epochs": 20, "batch": 50,
                           "lr": 3e-3, "early": 2},
    "text, 4 epochs": {"examples": 5000, "length": 64, "each": 64, "rows": 32, "epochs": 4,
                       "batch": 50, "lr": 5e-5, "warmup": 30, "early": 1},
    "last-layer, 4 epochs": {"examples": 1000, "length": 32, "each": 64, "rows": 32, "epochs": 4,
                             "batch": 50, "lr": 2e-4, "warmup": 8, "early": 1},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", default="digits,letters")
    parser.add_argument("--seeds", default="10-12")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path, help="folder of MiniLM's weights and tokenizer")
    parser.add_argument("--examples", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--length", type=int, help="tokens of a text")
    parser.add_argument("--no-prune", action="store_true")
    parser.add_argument("--trainings", type=int, default=3, help="of each set that is left")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--cheap", action="store_true", help="single-run detectors only")
    parser.add_argument("--ledgers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="keep other cells that --out has")
    parser.add_argument("--anew", action="store_true", help="the rule of removing has changed")
    a = parser.parse_args()
    before = json.loads(a.out.read_text()) if a.add else {}
    first, last = (a.seeds.split("-") * 2)[:2]
    context = Context(torch.device(a.device), a.data)
    if a.model is not None:
        encoder.folder = lambda data, hub=None: str(a.model)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"date": now, "hardware": hardware(context.device), "versions": versions(),
             "commit": commit()}  # fmt: skip
    cells: list[dict[str, Any]] = []
    for task, own in TASKS.items():
        kind_of_data = task.split(",")[0]
        if not {kind_of_data, f"{kind_of_data}-{own['epochs']}"} & set(a.tasks.split(",")):
            continue
        settings = COMMON | own | {"task": kind_of_data, "trainings": a.trainings}
        settings |= {k: v for k in ("examples", "epochs", "length") if (v := getattr(a, k))}
        for option, unit in (("examples", "rows"), ("length", "tokens")):
            task += f", {n} {unit}" if (n := getattr(a, option)) else ""
        for kind in a.kinds.split(","):
            for seed in range(int(first), int(last) + 1):
                name = f"{task.replace(', ', '-').replace(' ', '-')}-{kind}-{seed}"
                ledger = a.ledgers and a.ledgers / name
                own = settings | {"seed": seed}
                found = cell(own, kind, context, not a.no_prune, a.cheap, ledger)
                cells.append({"task": task, "kind": kind, "seed": seed} | found)
                print(json.dumps(cells[-1]), flush=True)
                if a.out:
                    a.out.write_text(
                        json.dumps(joined(before, about, cells, a.anew), indent=1) + "\n"
                    )
    print(table(cells))


def joined(
    before: dict[str, Any], about: dict[str, Any], cells: list[dict[str, Any]], anew: bool = False
) -> dict[str, Any]:
    """What a file holds that had ``before``."""
    again = {(c["task"], c["kind"], c["seed"]) for c in cells}
    removed_in = {(c["task"], c["kind"]) for c in cells if anew and "prune" in c}
    kept = []
    for c in before.get("cells", []):
        if (c["task"], c["kind"]) in removed_in:
            c = {k: v for k, v in c.items() if k not in ("prune", "trainings")}
        if (c["task"], c["kind"], c["seed"]) not in again and set(c) > {"task", "kind", "seed"}:
            kept.append(c)
    if not before:
        return about | {"cells": cells}
    commits = {*before.get("commits", [before.get("commit")]), about["commit"]} - {None}
    new = {k: v for k, v in about.items() if k != "commit"} | {"commits": sorted(commits)}
    old = {k: v for k, v in before.items() if k != "commit"}
    return old | new | {"cells": kept + cells}


def cell(
    settings: dict[str, Any], kind: str, context: Context, prune: bool, cheap: bool,
    ledger: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One watched training and what everybody makes of it."""
    problem = wrong_labels(problem_of(settings, context), kind, settings["seed"])
    trainer = Trainer(problem, settings, context)
    run = watched(trainer, ledger)
    suspects = run.suspects()
    scores = single_run(run)
    bad, found = problem.flipped, {}
    if bad.any():
        scores["suspects"] = suspects.sort_values("id")["suspicion"].to_numpy()
        plain = run.suspects(values=False)
        scores["suspects, without values"] = plain.sort_values("id")["suspicion"].to_numpy()
        if not cheap:
            scores |= detectors.early(trainer)["scores"]
            along = detectors.along_the_run(trainer)["scores"]
            scores |= {k: v for k, v in along.items() if k.startswith("TracIn")}
            scores["confident learning"] = confident(trainer)
        found["auroc"] = {k: round(auroc(s, bad), 4) for k, s in scores.items()}
        k = int(bad.sum())
        found["top k"] = [k, int(bad[suspects["id"].to_numpy()[:k]].sum())]
    found["confidence"] = stated(suspects["confidence"].to_numpy(), bad[suspects["id"].to_numpy()])
    found["window"] = suspects.attrs["window"]
    if prune:
        found["prune"] = pruned(trainer, suspects, run)
        found["trainings"] = settings["trainings"]
    return found


def watched(trainer: Trainer, ledger: Path | None) -> Any:
    """The run, in memory or in a new folder; the one in the folder if there is one."""
    if ledger is None or not ledger.exists():
        begun = ledger and ledger.with_name(f"{ledger.name}.begun")
        if begun is not None and begun.exists():  # what a killed run left
            shutil.rmtree(begun)
        for _, _, run in trainer.run(["secant"], out=begun):  # noqa: B007
            pass
        if ledger is None or begun is None:
            return run
        begun.rename(ledger)
    return inrun.open(ledger)


def stated(confidence: np.ndarray, bad: np.ndarray) -> dict[str, Any]:
    """The stated least share of wrong labels among the first k beside the real one; how far it is
    above that at most, from k = 20 on; and how many suspects are ``SURE``, and of these wrong."""
    share = bad.cumsum() / np.arange(1, len(bad) + 1)
    sure = int((confidence >= SURE).sum())
    return {
        "stated": [[k, round(confidence[k - 1], 3), round(share[k - 1], 3)] for k in FIRST],
        "above": round(float((confidence - share)[FIRST[0] - 1 :].max()), 4),
        "sure": [sure, int(bad[:sure].sum())],
    }


def single_run(run: Any) -> dict[str, np.ndarray]:
    values, history = run.values(), run.history()
    end = history.sort_values("step").drop_duplicates("id", keep="last").sort_values("id")
    return {
        "loss, mean": values["loss"].to_numpy(), "AUM": -values["margin"].to_numpy(),
        "loss, end": end["loss"].to_numpy(), "EL2N, all visits": values["el2n"].to_numpy(),
        "harm": run.harm()["harm"].to_numpy(), "sum of values": -values["value"].to_numpy(),
    }  # fmt: skip


def confident(trainer: Trainer) -> np.ndarray:
    """1 − the probability of the given label, out of fold, relative to its mean over that label
    (the thresholds of confident learning)."""
    p = detectors.out_of_fold(trainer)["probabilities"]
    y = trainer.problem.train[1].cpu().numpy()
    own = p[np.arange(len(y)), y]
    means = np.array([own[y == c].mean() if (y == c).any() else 0 for c in range(p.shape[1])])
    return means[y] - own


def pruned(trainer: Trainer, suspects: Any, run: Any) -> dict[str, dict[str, float]]:
    """Accuracy after training on what is left; the mean over as many sets where some of them is
    drawn at random (``auto`` where values do not say enough) as where all is."""
    seed, ids = trainer.settings["seed"], suspects["id"].to_numpy()
    n = len(ids)
    lowest = run.values().sort_values("value")["id"].to_numpy()
    found: dict[str, dict[str, float]] = {}
    known: dict[frozenset[int], float] = {}  # two rules may remove the same

    def left(gone: np.ndarray) -> float:
        key = frozenset(gone.tolist())
        known[key] = known.get(key) or accuracy(trainer, gone)
        return known[key]

    for ratio in (0.1, 0.3):
        k = round(ratio * n / trainer.settings["batch"]) * trainer.settings["batch"]
        gone = {rule: [ids[removed(suspects, k, rule)]] for rule in ("auto", "noisy", "clean")}
        gone["lowest values"] = [lowest[:k]]
        draws = [1000 * i + seed for i in range(RANDOM)]
        gone["auto"] = [ids[removed(suspects, k, "auto", draw)] for draw in draws]
        # the same draws: where values say nothing, auto is random, and the difference 0
        gone["random"] = [ids[np.random.default_rng(draw).permutation(n)[:k]] for draw in draws]
        means = {name: float(np.mean([left(out) for out in sets])) for name, sets in gone.items()}
        found[str(ratio)] = {name: round(mean, 5) for name, mean in means.items()}
    return found


def accuracy(trainer: Trainer, gone: np.ndarray) -> float:
    """The mean over plain trainings of their own seeds, without these examples; as many steps as
    with all of them."""
    rest, found = np.setdiff1d(np.arange(trainer.problem.examples), gone), []
    first = trainer.settings["seed"] + 500
    for seed in range(first, first + trainer.settings["trainings"]):
        model = trainer.problem.build(seed)
        optimizer = tasks.optimizer("adamw", model, trainer.settings["lr"])
        for step, ids in enumerate((2 * trainer.order(rest, seed))[: trainer.steps]):
            trainer.warm(optimizer, step)
            tasks.classify(model, trainer.rows(ids)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(detectors.accuracy(trainer, taken(model)))
    return round(float(np.mean(found)), 5)


# Problems


def problem_of(settings: dict[str, Any], context: Context) -> Problem:
    if settings["task"] == "last-layer":
        return last_layer(problems.make(settings | {"task": "text"}, context))
    if settings["task"] != "letters":
        return problems.make(settings, context)
    rng = np.random.default_rng(settings["seed"])
    n, each = settings["examples"], settings["each"]
    x, y = (t.to(context.device) for t in letters(rng, n + 26 * each * 3 + 1000))
    held = np.arange(n, len(y))
    labels = y.cpu().numpy()
    rows = np.concatenate([held[labels[held] == c][:each] for c in range(26)])
    others = np.setdiff1d(held, rows)
    return Problem(
        "letters", lambda seed: reader(seed).to(context.device), (x[:n], y[:n]), np.zeros(n, bool),
        (x[rows], y[rows]), (x[others], y[others]), 26,
    )  # fmt: skip


def last_layer(problem: Problem) -> Problem:
    """The problem of training the encoder's last layer and the head alone: the texts as what the
    layers below, which stay as they are, make of them."""

    def here(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return encoder.below(whole, batch[0]), batch[1]

    whole = problem.build(0)
    assert isinstance(whole, encoder.Encoder)
    return replace(
        problem, build=lambda seed: encoder.LastLayer(problem.build(seed).model),
        train=here(problem.train), validation=here(problem.validation), test=here(problem.test),
    )  # fmt: skip


def letters(rng: np.random.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Small letters in the fonts that come with matplotlib."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts/ttf").glob("DejaVuS*.ttf"))
    drawn = {(f, s): ImageFont.truetype(f, s) for f in map(str, fonts) for s in range(12, 17)}
    kinds = [k for k in drawn if "Display" not in k[0]]
    labels, found = rng.integers(26, size=n), np.zeros((n, 1, 16, 16), np.float32)
    for i, c in enumerate(labels):
        font = drawn[kinds[rng.integers(len(kinds))]]
        image = Image.new("L", (24, 24))
        ImageDraw.Draw(image).text((12, 12), chr(97 + c), fill=255, font=font, anchor="mm")
        shift = tuple(int(d) for d in rng.integers(-1, 2, 2))
        image = image.rotate(10 * rng.normal(), Image.Resampling.BILINEAR, translate=shift)
        x = np.asarray(image.crop((4, 4, 20, 20)), np.float32) / 255
        found[i, 0] = x * rng.uniform(0.6, 1) + 0.15 * rng.normal(size=x.shape)
    return torch.from_numpy(found), torch.from_numpy(labels)


def reader(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 26),
        )  # fmt: skip


def wrong_labels(problem: Problem, kind: str, seed: int) -> Problem:
    """The problem with labels changed (see above)."""
    rng, C = np.random.default_rng((seed, 7)), problem.classes
    x, right = problem.train
    y = right.cpu().numpy().copy()
    n = len(y)
    at = rng.choice(n, 0 if kind == "clean" else n // 10, replace=False)
    if kind == "uniform":
        y[at] = (y[at] + rng.integers(1, C, len(at))) % C
    elif kind == "one-sided":
        source, to = rng.choice(C, 2, replace=False)
        pool = np.flatnonzero(y == source)
        at = rng.choice(pool, round(0.3 * len(pool)), replace=False)
        y[at] = to
    elif kind == "confusions":
        circle = rng.permutation(C)
        after = np.empty(C, int)
        after[circle] = np.roll(circle, -1)
        y[at] = after[y[at]]
    bad = np.zeros(n, bool)
    bad[at] = True
    return replace(problem, train=(x, torch.from_numpy(y).to(right.device)), flipped=bad)


def table(cells: list[dict[str, Any]]) -> str:
    """Means over seeds ± their standard error."""
    lines, groups = [], sorted({(c["task"], c["kind"]) for c in cells})
    for task, kind in groups:
        own = [c for c in cells if (c["task"], c["kind"]) == (task, kind)]
        lines.append(f"\n{task}, {kind} ({len(own)} seeds)")
        if "auroc" in own[0]:
            for name in own[0]["auroc"]:
                lines.append(f"  AUROC {name:28} {_mean([c['auroc'][name] for c in own])}")
            k, wrong = np.sum([c["top k"] for c in own], axis=0)
            lines.append(f"  of the first {k} (as many as there are wrong): {wrong} wrong")
        shown, wrong = np.sum([c["confidence"]["sure"] for c in own], axis=0)
        lines.append(f"  confidence {SURE} or more: {shown}, of these {wrong} wrong")
        above = max(c["confidence"]["above"] for c in own)
        lines.append(f"  confidence is at most {above:+.3f} above the share of wrong ones")
        weights = [c["window"]["weight"] for c in own]
        lines.append(f"  weight of values {np.mean(weights):.2f}")
        for ratio in own[0].get("prune", {}):
            for name in own[0]["prune"][ratio]:
                gain = [c["prune"][ratio][name] - c["prune"][ratio]["random"] for c in own]
                lines.append(f"  {ratio} removed, {name:16} {_mean(gain)} against random")
    return "\n".join(lines)


def _mean(x: list[float]) -> str:
    error = np.std(x, ddof=1) / len(x) ** 0.5 if len(x) > 1 else float("nan")
    return f"{np.mean(x):.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
