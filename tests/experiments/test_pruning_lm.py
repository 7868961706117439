"""A language model trained again without part of its corpus."""

import numpy as np
import pytest
import torch

from experiments.common import tasks
from experiments.common.parts import Context
from experiments.pruning_lm import parts
from experiments.pruning_lm.summary import summarise
from experiments.pruning_lm.train import ESTIMATORS, measure, order, spoil
from helpers.experiments import run

CPU = Context(torch.device("cpu"))
TINY = parts("tiny")["noisy-seed0"]
HELD = {"validation": TINY["values"] + TINY["evaluation"]}


def test_pruning_by_value(tmp_path):
    summary = run("pruning-lm", tmp_path)
    assert set(summary) == {"plain", "noisy"}
    assert summary["plain"]["spoilt"] == 0 and summary["noisy"]["spoilt"] == 16
    for s in summary.values():
        assert s["void"] == 0
        found = s["settings"]
        assert {f"values20, {e}" for e in ESTIMATORS} < set(found)
        assert all(len(c["mean"]) == len(s["at"]) for c in found.values())
        assert all(c["mean"][-1] < c["mean"][0] for c in found.values())
        assert found["full"]["mean"][0] == found["random20"]["mean"][0]  # the same first weights
        last = {name: c["loss"]["steps"]["mean"] for name, c in found.items()}
        assert last["values20, secant"] < last["random20"] < last["top20, secant"]


def test_everybody_trains_equally_long_on_what_is_kept():
    kept = np.array([1, 2, 5, 7, 8])
    batches = order(kept, 8, 3, 0)
    assert [len(b) for b in batches] == [3] * 8
    counts = torch.cat(batches).bincount(minlength=9)
    assert counts[kept].min() >= 4 and counts[kept].max() <= 5
    assert counts.sum() == counts[kept].sum() == 24


def test_shuffled_sequences_keep_their_tokens_and_do_not_depend_on_the_seed():
    task, other = (tasks.make(TINY | HELD | {"seed": s}, CPU, torch.float64) for s in (0, 5))
    before = task.train[0].clone()
    spoilt = spoil(task, TINY)
    assert (spoil(other, TINY) == spoilt).all() and torch.equal(other.train[0], task.train[0])
    changed = (before != task.train[0]).any(1).nonzero().flatten().tolist()
    assert len(spoilt) == 16 and sorted(spoilt) == changed
    assert torch.equal(before.sort(1).values, task.train[0].sort(1).values)


def test_matched_epochs_end_earlier_for_what_was_pruned():
    curves = {"full": [3.0, 2.0, 1.0], "random20": [3.0, 1.5, 0.9], "values20, secant": [3, 1.4, 1]}
    result = {
        "kind": "plain", "seed": 0, "model": "gpt", "examples": 10, "removed": 5, "steps": 10,
        "batch": 1, "length": 1, "at": [0, 5, 10], "curves": curves, "overlap": {},
        "spoilt": dict.fromkeys((*curves, "all"), 0), "void": 0,
    }  # fmt: skip
    found = summarise({"a": result})["plain"]
    assert found["epochs_at"] == 5
    versus = found["settings"]["values20, secant"]["versus"]
    assert versus["full"]["steps"]["mean"] == pytest.approx(0.0)
    assert versus["full"]["epochs"]["mean"] == pytest.approx(0.4)  # 1.4 after 5 steps, 1.0 after 10
    assert versus["random20"]["epochs"]["mean"] == pytest.approx(-0.1)


def test_too_few_steps_to_value_everything():
    with pytest.raises(ValueError, match="raise steps"):
        measure(TINY | {"steps": 6}, CPU)
