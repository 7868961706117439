"""Scores of single positions, of the examples that were found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from inrun.asking.parts import Scored, scores_of
from inrun.asking.stored import TOKENS, Answers
from inrun.ledger import files
from inrun.ranks.world import World

FIRST = 10  # examples of each question whose positions a folder of answers holds


def first_of(answers: Answers, n: int = FIRST) -> set[Any]:
    """The ids of the n highest scores of each question."""
    return {x for q in answers.questions for x in answers.scores.nlargest(n, q)["id"].tolist()}


def those_with(data: Iterable[Any], wanted: set[Any]) -> Iterator[Any]:
    """The batches of the data in which one of these ids is."""
    for item in data:
        if not isinstance(item, (tuple, list)) or not wanted.isdisjoint(_plain(item[0])):
            yield item


def _plain(ids: Any) -> list[Any]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def positions(
    found: Iterable[Scored], names: Sequence[str], examples: int, world: World,
    wanted: set[Any] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """A row for each position of the examples (``wanted``: only of these), in the order of ranks
    and of their data."""
    own = world.together(lambda: [_frame(batch, names, wanted) for batch in found])
    frames = [frame for some in world.gather(own) for frame in some]
    if not frames:
        raise ValueError("the training data is empty: there is nobody to score")
    table = pd.concat(frames, ignore_index=True)
    table[list(names)] /= examples
    return table


def _frame(batch: Scored, names: Sequence[str], wanted: set[Any] | None) -> pd.DataFrame:
    assert batch.slots is not None
    slots = batch.slots.cpu().numpy()
    frame = pd.DataFrame(batch.scores, columns=pd.Index(names))
    inputs = None if batch.inputs is None else batch.inputs.flatten().cpu().numpy()
    frame.insert(0, "input", pd.NA if inputs is None else inputs)
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    frame, owner = frame.iloc[order].reset_index(drop=True), slots[order]
    frame.insert(0, "position", frame.groupby(owner).cumcount())
    frame.insert(0, "id", batch.ids[owner])
    return frame if wanted is None else frame[frame["id"].isin(list(wanted))]


def save(table: pd.DataFrame, names: Sequence[str], examples: int, folder: Path) -> None:
    """Keep them beside the answers, as ⟨u, ∇ℓ⟩ like the parts."""
    scores = scores_of(table[list(names)].to_numpy() * examples)
    inputs = table["input"]
    columns = {
        "id": pa.array(table["id"].tolist()),
        "position": pa.array(table["position"].to_numpy(np.int64)),
        "input": pa.nulls(len(table)) if inputs.isna().all()
        else pa.array(inputs.to_numpy(np.int64)),
    }  # fmt: skip
    with files.disk(folder, "the answers are there without their tokens"):
        files.write_parquet(folder / TOKENS, [pa.table(columns | scores)])
