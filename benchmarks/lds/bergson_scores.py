"""bergson, called as its documentation says: EK-FAC and TrackStar. It reads a language model of
transformers from a folder and datasets from others, and scores the linear layers below the head.

Its requirements name torchvision, torchaudio and bitsandbytes, of which these methods need none:
without them, it was installed with ``pip install --no-deps``, and the other requirements by hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lds.credit import Credit, credited
from benchmarks.lds.gradients import Training
from benchmarks.lds.ours import end
from benchmarks.lds.problems import Causal, Problem

PROJECTED = 16  # bergson's own: TrackStar's projections of each layer are 16 × 16


@dataclass(frozen=True)
class Files:
    """What bergson reads: a model with a tokenizer (of which it wants the length only), and tokens
    of the training rows and queries."""

    folder: Path

    def index(self, kind: type, **options: Any) -> Any:
        """The training rows, and where results go."""
        from bergson.config.config import DataConfig

        return kind(
            run_path=str(self.folder / "run"), model=str(self.folder / "model"),
            data=DataConfig(dataset=str(self.folder / "train")), loss_reduction="mean", **options,
        )  # fmt: skip

    def queries(self) -> Any:
        """One score for each query."""
        from bergson.config.config import QuerySetConfig

        return QuerySetConfig(dataset=str(self.folder / "queries"), aggregation="none")

    def scores(self) -> Tensor:
        """[N, Q]; higher is better."""
        from bergson.data import load_scores

        found = load_scores(self.folder / "run" / "scores")
        return torch.from_numpy(np.array(found[:], np.float64))


def ekfac(files: Files) -> Tensor:
    from bergson.config.config import (
        HessianConfig,
        HessianPipelineConfig,
        IndexConfig,
        PreprocessConfig,
        ScoreConfig,
    )
    from bergson.hessians.pipeline import hessian_pipeline

    hessian_pipeline(
        files.index(IndexConfig), HessianConfig(method="kfac", ev_correction=True), ScoreConfig(),
        PreprocessConfig(), HessianPipelineConfig(query=files.queries()),
    )  # fmt: skip
    return files.scores()


def trackstar(files: Files, mixed: bool) -> Tensor:
    """``mixed``: the second moments of the queries' gradients, too, as is its default. It says to
    leave them out where queries are few."""
    from bergson.cli import trackstar
    from bergson.config.config import PreprocessConfig, TrackstarConfig, TrackstarIndexConfig

    trackstar.trackstar(
        files.index(TrackstarIndexConfig, projection_dim=PROJECTED),
        TrackstarConfig(
            query=files.queries(), preprocess_cfg=PreprocessConfig(unit_normalize=True),
            mix_hessians=mixed,
        ),
    )  # fmt: skip
    return files.scores()


def scored(
    name: str, work: Callable[[Files], Tensor], problem: Problem, seed: int, training: Training
) -> dict[str, Credit]:
    def run() -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            return work(saved(Path(folder), problem, seed, training))

    return credited(name, run, problem)


def saved(folder: Path, problem: Problem, seed: int, training: Training) -> Files:
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    disable_progress_bars()
    model = problem.make(seed)
    assert isinstance(model, Causal)
    model.load_state_dict(end(training))
    model.model.save_pretrained(folder / "model")
    words = models.WordLevel({str(k): k for k in range(model.model.config.vocab_size)}, "0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder / "model")
    for name, (ids,) in (("train", problem.train), ("queries", problem.queries)):
        rows = {"input_ids": ids.tolist(), "length": [ids.shape[1]] * len(ids)}
        Dataset.from_dict(rows).save_to_disk(folder / name)
    return Files(folder)


def bergson_ekfac(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    return scored("bergson EK-FAC, 0.1 × mean eigenvalue", ekfac, problem, seed, training)


def bergson_trackstar(problem: Problem, seed: int, training: Training) -> dict[str, Credit]:
    found: dict[str, Credit] = {}
    for how, mixed in (("", True), (", rows' moments alone", False)):
        name = f"bergson TrackStar, {PROJECTED} × {PROJECTED} for each layer{how}"
        found |= scored(name, partial(trackstar, mixed=mixed), problem, seed, training)
    return found
