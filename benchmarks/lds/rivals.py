"""Other libraries, called as their documentation says: dattri, kronfluence, traker, captum and
bergson (bergson_scores.py). One that is not installed or fails is named in the results. Problems
that do not classify are for those that take a loss of any kind (``ANY_LOSS``), and language models
of transformers for bergson, which reads nothing else.

Their credits are of one trained model (TracInCP: of its checkpoints). Damping decides much, and
defaults do badly here (TRAK has none, with more features than examples). So it was chosen in favour
of each library: by its LDS on digits-mlp-noisy, run 0, out of a few powers of ten and three times
them. It is the same on all problems. A choice of ours is in the name of the method.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.lds.bergson_scores import bergson_ekfac, bergson_trackstar
from benchmarks.lds.credit import Credit, Method, credited
from benchmarks.lds.gradients import Training
from benchmarks.lds.ours import CHECKPOINTS, end
from benchmarks.lds.problems import Batch, Problem

PROJECTED = 4096
DAMPING = 1e-2  # of influence functions
TRAK_DATTRI, TRAK_TRAKER = 1e-2, 100.0  # dattri divides features by the root of their number
KRONFLUENCE = {"default damping": 1e-8, "0.1 × mean eigenvalue": None, "damping 0.01": 1e-2}


def loaders(problem: Problem, rows: int = 100) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return (DataLoader(TensorDataset(*problem.train), rows),
            DataLoader(TensorDataset(*problem.queries), rows))  # fmt: skip


def one_row(problem: Problem, model: nn.Module) -> Callable[..., Tensor]:
    """The loss of one row as dattri wants it: of parameters and a row without its batch."""
    every = rows_loss(problem, model)
    return lambda weights, row: every(weights, tuple(x[None] for x in row))


def rows_loss(problem: Problem, model: nn.Module) -> Callable[..., Tensor]:
    """The mean loss of a batch as dattri wants it: of parameters and the batch."""

    def loss(weights: dict[str, Tensor], rows: Batch) -> Tensor:
        def call(x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,))

        return problem.losses(call, tuple(rows)).mean()  # type: ignore[arg-type]

    return loss


def log_odds(loss: Tensor) -> Tensor:
    return -loss - torch.log1p(-torch.exp(-loss) + 1e-7)


def dattri_trak(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    loss = one_row(problem, training.model)
    task = AttributionTask(
        lambda w, row: log_odds(loss(w, row)), training.model, dict(end(training))
    )
    train, queries = loaders(problem)

    def work() -> Tensor:
        found = TRAKAttributor(
            task, lambda w, row: torch.exp(-loss(w, row)),
            projector_kwargs={"proj_dim": PROJECTED, "device": str(problem.device)},
            device=str(problem.device), regularization=TRAK_DATTRI,
        )  # fmt: skip
        found.cache(train)
        return found.attribute(queries)

    return credited(f"dattri TRAK, {PROJECTED} dimensions, λ {TRAK_DATTRI:g}", work, problem)


def dattri_tracin(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask

    kept = _checkpoints(training)
    task = AttributionTask(one_row(problem, training.model), training.model, kept)
    train, queries = loaders(problem)

    def work() -> Tensor:
        rates = torch.full((len(kept),), problem.lr)
        found = TracInAttributor(
            task, weight_list=rates, normalized_grad=False, device=str(problem.device)
        )
        return found.attribute(train, queries)

    return credited(f"dattri TracIn, {len(kept)} checkpoints", work, problem)


def dattri_ekfac(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from dattri.algorithm.influence_function import IFAttributorEKFAC
    from dattri.task import AttributionTask

    loss = rows_loss(problem, training.model)
    task = AttributionTask(loss, training.model, dict(end(training)))
    train, queries = loaders(problem)

    def work() -> Tensor:
        found = IFAttributorEKFAC(task, device=str(problem.device), damping=DAMPING)
        found.cache(train)
        return found.attribute(train, queries)

    return credited(f"dattri EK-FAC, linear layers, damping {DAMPING:g}", work, problem)


def dattri_cg(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from dattri.algorithm.influence_function import IFAttributorCG
    from dattri.task import AttributionTask

    def loss(weights: dict[str, Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
        x, y = rows
        if y.ndim == 0:
            x, y = x[None], y[None]
        return F.cross_entropy(torch.func.functional_call(training.model, weights, (x,)), y)

    task = AttributionTask(loss, training.model, dict(end(training)))
    train, queries = loaders(problem, 1000)

    def work() -> Tensor:
        found = IFAttributorCG(
            task, device=str(problem.device), max_iter=10, regularization=DAMPING
        )
        found.cache(train)
        return found.attribute(train, queries)

    return credited(f"dattri IF, conjugate gradients, damping {DAMPING:g}", work, problem)


def drawn_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The losses of rows with labels, or next tokens, drawn from what the model predicts: [B]."""
    logits = model(batch[0])
    if len(batch) == 1:  # tokens only: each position predicts the next
        logits = logits[:, :-1]
    flat = logits.flatten(0, -2)
    drawn = torch.multinomial(flat.detach().softmax(-1), 1).flatten()
    return F.cross_entropy(flat, drawn, reduction="none").view(len(batch[0]), -1).mean(1)


def kronfluence_ekfac(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Losses(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            losses = drawn_losses if sample else problem.losses
            return losses(model, tuple(batch)).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return problem.losses(model, tuple(batch)).sum()

    def work(damping: float | None) -> Tensor:
        task = Losses()
        model = problem.make(seed)
        model.load_state_dict(end(training))
        with tempfile.TemporaryDirectory() as folder:
            analyzer = Analyzer(
                "lds", prepare_model(model, task), task, cpu=problem.device.type == "cpu",
                output_dir=folder, disable_tqdm=True,
            )  # fmt: skip
            train, queries = TensorDataset(*problem.train), TensorDataset(*problem.queries)
            analyzer.fit_all_factors(
                "factors", train, 100, factor_args=FactorArguments(strategy="ekfac")
            )
            damped = ScoreArguments(damping_factor=damping)
            analyzer.compute_pairwise_scores(
                "scores", "factors", queries, train, 100, 100, score_args=damped
            )
            return analyzer.load_pairwise_scores("scores")["all_modules"].T

    found: dict[str, Credit] = {}
    for how, damping in KRONFLUENCE.items():
        found |= credited(f"kronfluence EK-FAC, {how}", partial(work, damping), problem)
    return found


def traker_trak(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    model = problem.make(seed)
    model.load_state_dict(end(training))
    parameters = sum(w.numel() for w in model.parameters())

    def work() -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            projector = BasicProjector(
                parameters, PROJECTED, 0, ProjectionType.rademacher, problem.device, block_size=100,
            )  # fmt: skip
            traker = TRAKer(
                model, "image_classification", problem.examples, folder, device=problem.device,
                projector=projector, proj_dim=PROJECTED, use_half_precision=False,
                lambda_reg=TRAK_TRAKER,
            )  # fmt: skip
            train, queries = loaders(problem)
            traker.load_checkpoint(model.state_dict(), model_id=0)
            for batch in train:
                traker.featurize(batch, num_samples=len(batch[0]))
            traker.finalize_features()
            asked = len(problem.queries[0])
            traker.start_scoring_checkpoint("queries", model.state_dict(), 0, num_targets=asked)
            for batch in queries:
                traker.score(batch, num_samples=len(batch[0]))
            # without a GPU there is no memory to pin, and traker 0.3.2 does not ask
            unpinned = mock.patch.object(Tensor, "pin_memory", lambda x: x)
            with unpinned if problem.device.type == "cpu" else contextlib.nullcontext():
                return torch.as_tensor(traker.finalize_scores("queries")).clone()

    return credited(f"traker TRAK, {PROJECTED} dimensions, λ {TRAK_TRAKER:g}", work, problem)


def captum_tracin(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    from captum.influence import TracInCP

    kept, model = _checkpoints(training), problem.make(seed)

    def load(module: nn.Module, path: str) -> float:
        module.load_state_dict(torch.load(path, weights_only=True))
        return 1.0

    def work() -> Tensor:
        with _saved(kept) as paths:
            found = TracInCP(
                model, TensorDataset(*problem.train), paths, checkpoints_load_func=load,
                loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=100,
                sample_wise_grads_per_batch=True,
            )  # fmt: skip
            return found.influence(problem.queries).T

    return credited(f"captum TracInCP, {len(kept)} checkpoints", work, problem)


def _checkpoints(training: Training) -> list[dict[str, Tensor]]:
    last = max(training.weights)
    wanted = [(k + 1) * last // CHECKPOINTS for k in range(CHECKPOINTS)]
    near = [min(training.weights, key=lambda s, t=t: abs(s - t)) for t in wanted]  # type: ignore
    return [dict(training.weights[t]) for t in near]


@contextlib.contextmanager
def _saved(checkpoints: list[dict[str, Tensor]]) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{k}.pt") for k in range(len(checkpoints))]
        for weights, path in zip(checkpoints, paths, strict=True):
            torch.save(weights, path)
        yield paths


LIBRARIES = {
    "dattri": (dattri_trak, dattri_tracin, dattri_ekfac, dattri_cg),
    "kronfluence": (kronfluence_ekfac,),
    "traker": (traker_trak,),
    "captum": (captum_tracin,),
}
TRANSFORMERS = {"bergson": (bergson_ekfac, bergson_trackstar)}

ANY_LOSS = (dattri_trak, dattri_tracin, dattri_ekfac, kronfluence_ekfac)


def of(problem: Problem) -> list[Method]:
    """The methods that can read this problem. Of large models none that forms the gradients of
    many rows at a time."""
    if problem.classifies:
        return [m for many in LIBRARIES.values() for m in many]
    if problem.chunk is not None:
        return [kronfluence_ekfac]
    return [*ANY_LOSS, *(m for many in TRANSFORMERS.values() for m in many if problem.transformers)]


def versions() -> dict[str, str | None]:
    """Of the libraries; None where one is not installed."""
    found: dict[str, str | None] = {}
    for name in (*LIBRARIES, *TRANSFORMERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
