"""Runs on disk seen from the training loop: starting, resuming, starting again."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun

X, Y = torch.zeros(40, 4), torch.zeros(40, dtype=torch.long)


@pytest.fixture(autouse=True)
def _data(_settings):
    """Drawn anew for each test, in its precision, whatever the tests before it did."""
    X.data, Y.data = torch.randn(40, 4), torch.randint(0, 3, (40,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def start(folder, **options):
    torch.manual_seed(0)
    X.data = torch.randn(40, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"validation": [(X[32:], Y[32:])], "loss": loss} | options
    return inrun.watch(model, optimizer, out=folder, **options)


def go(run, steps, watched=True, name=int):
    for t in range(steps):
        rows = torch.arange(8) + 8 * (t % 4)
        if watched:
            with run.batch([name(r) for r in rows.tolist()]):
                loss(run.model, (X[rows], Y[rows])).backward()
        else:
            loss(run.model, (X[rows], Y[rows])).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("name", ["id=7", "step=100", "weight=3", "secant=5", "a[b]*'c"])
def test_the_name_of_a_folder_changes_nothing(tmp_path, name):
    memory, disk = start(None), start(tmp_path / name)
    for run in (memory, disk):
        go(run, 4)
        run.close()
    assert inrun.open(tmp_path / name).values().equals(memory.values())
    assert np.allclose(disk.harm()["harm"], memory.harm()["harm"], rtol=1e-12)


def test_copies_that_differ_by_rounding_do_no_harm():
    torch.set_default_dtype(torch.float32)
    run = start(None, estimator="secant")  # sampled orders differ from copy to copy
    row = X[:1].repeat(6, 1)
    for _ in range(4):
        with run.batch(range(6)):
            loss(run.model, (row, Y[:1].repeat(6))).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert not (run.harm()["harm"] > 0).any()


def test_a_folder_in_use_is_refused_and_overwritten_on_request(tmp_path):
    run = start(tmp_path / "r")
    go(run, 6)
    run.close()
    again = start(tmp_path / "r")
    with pytest.warns(UserWarning, match="without run.batch"):
        go(again, 7, watched=False)
    with pytest.raises(inrun.LedgerError, match="holds steps up to 5"):
        go(again, 1)
    again.close()
    assert len(inrun.open(tmp_path / "r").steps()) == 6
    other = start(tmp_path / "r", every=1, estimator="tangent", overwrite=True)
    with pytest.warns(UserWarning, match="without run.batch"):
        go(other, 2, watched=False)
    go(other, 1, name=str)
    other.close()
    saved = inrun.open(tmp_path / "r")
    assert saved.steps()["step"].tolist() == [2] and saved.estimators == ["tangent"]
    assert saved.values()["id"].tolist() == [str(i) for i in range(8)]
    assert saved.info["coverage"]["share"] == 1.0


def test_a_mistake_in_watch_leaves_no_folder(tmp_path):
    for options in ({"estimator": "secnat"}, {"ignore": ["nothing"]}):
        with pytest.raises(ValueError):
            start(tmp_path / "r", **options)
        assert not (tmp_path / "r").exists()


def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_lost(tmp_path):
    a, b = start(tmp_path / "a"), start(tmp_path / "b")
    go(a, 6)
    go(b, 3)
    with pytest.raises(inrun.LedgerError, match="another ledger"):
        a.load_state_dict(b.state_dict())
    with pytest.raises(inrun.LedgerError, match="in memory"):
        a.load_state_dict(start(None).state_dict())
    with pytest.raises(inrun.LedgerError, match="the same out= as then"):
        start(None).load_state_dict(a.state_dict())
    go(a, 1)
    assert a.steps()["step"].tolist() == list(range(7))


def test_resuming_before_the_first_step_still_describes_the_run(tmp_path):
    run = start(tmp_path / "r")
    state = run.state_dict()
    run.close()
    run = start(tmp_path / "r")
    run.load_state_dict(state)
    go(run, 2)
    run.close()
    assert inrun.open(tmp_path / "r").info["model"]["class"] == "Sequential"


def test_targets_may_be_called_label_and_group(tmp_path):
    from inrun.report import write_report

    targets = {"label": [(X[32:36], Y[32:36])], "group": [(X[36:], Y[36:])]}
    run = start(tmp_path / "r", validation=None, targets=targets)
    go(run, 3)
    run.close()
    examples = tmp_path / "e.csv"
    examples.write_text(
        "id,text,label,group\n" + "".join(f"{i},t{i},NA,g{i % 2}\n" for i in range(24))
    )
    write_report(inrun.open(tmp_path / "r"), tmp_path / "report.html", examples)
    assert "NA" in (tmp_path / "report.html").read_text()
