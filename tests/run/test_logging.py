"""One line that says how a run is doing; TensorBoard and W&B get the same numbers."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import inrun
from inrun.ledger.audits import audit_summary
from inrun.run.logging import LinePrinter


def watched(steps=12, audit_every=3, keep_open=False, **log):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(20, 4)
    run = inrun.watch(
        model, optimizer, validation=[x[:5]], loss=lambda m, x: m(x).square().mean(),
        audit_every=audit_every,
    )  # fmt: skip
    if log:
        assert inrun.log(run, **log) is run
    for step in range(steps):
        rows = torch.arange(step % 5, 20, 5)
        with run.batch(rows):
            F.mse_loss(model(x[rows]), torch.ones(len(rows), 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not keep_open:
        run.close()
    return run


class Recorder:
    """Stands for a SummaryWriter and for a W&B run: it writes down what it is told."""

    def __init__(self):
        self.scalars, self.texts, self.logged, self.closed = {}, {}, [], 0

    def add_scalar(self, name, value, step):
        self.scalars.setdefault(name, []).append((step, value))

    def add_text(self, name, value, step):
        self.texts.setdefault(name, []).append((step, value))

    def log(self, content):
        self.logged.append(content)

    def flush(self):
        self.closed += 1


def test_the_line_says_what_the_tables_say():
    run = watched()
    steps, tally = run.steps(), run.tally
    summary = audit_summary(steps)
    assert tally.explained == pytest.approx(summary["explained"])
    assert tally.total == pytest.approx(steps["sum"].sum())
    assert tally.audited == summary["audited"] == 4
    text = f"step 11 · 48 rows scored · sum {tally.total:.4g}"
    assert repr(run).startswith(f"<inrun: {text}")
    assert f"explained {summary['explained']:.1%} of the batch share" in repr(run)
    assert text in run._repr_html_()


def test_the_line_leaves_out_what_was_not_recorded():
    assert repr(watched(steps=0)) == "<inrun: nothing recorded yet>"
    assert "explained" not in repr(watched(audit_every=0))


def test_going_back_to_a_checkpoint_starts_the_tally_again():
    run = watched(keep_open=True)
    state = run.state_dict() | {"step": 6}
    run.load_state_dict(state)
    x = torch.randn(2, 4)
    with run.batch([0, 1]):
        run.model(x).sum().backward()
    run.optimizer.step()
    assert run.tally.steps == 1 and run.tally.last == 6
    run.close()


def test_lines_end_in_a_file_and_are_overwritten_in_a_terminal(capsys):
    run = watched(every=5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 4", "step 9", "step 11"]
    assert lines[-1] in repr(run)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    printer = LinePrinter(terminal)
    printer.show("a long line")
    printer.end("short")
    assert terminal.getvalue() == "\ra long line\rshort      \n"


def test_a_writer_of_ones_own_is_called():
    writer = Recorder()
    run = watched(every=6, tensorboard=writer, lowest=2)
    assert writer.closed == 1
    assert writer.scalars["inrun/sum of values"][-1] == (11, run.tally.total)
    assert [s for s, _ in writer.scalars["inrun/explained"]] == [5, 11]
    lowest = run.values().nsmallest(2, "value")
    (step, text), value = writer.texts["inrun/lowest ids"][-1], writer.scalars["inrun/lowest value"]
    assert step == 11 and [int(x.split()[0]) for x in text.split(", ")] == lowest["id"].tolist()
    assert value[-1][1] == pytest.approx(lowest["value"].iloc[0])


def test_tensorboard_files_hold_the_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = watched(every=4, tensorboard=tmp_path / "tb")
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    found = events.Scalars("inrun/explained")
    assert [e.step for e in found] == [3, 7, 11]
    assert found[-1].value == pytest.approx(run.tally.explained, rel=1e-6)


def test_wandb_run_of_ones_own(capsys):
    wandb = Recorder()
    run = watched(every=12, wandb=wandb)
    (content,) = wandb.logged
    assert content["inrun/step"] == 11 and content["inrun/explained"] == run.tally.explained
    assert content["inrun/lowest ids"].count(",") == 4
    assert np.isfinite([v for v in content.values() if isinstance(v, float)]).all()
    assert capsys.readouterr().out == ""  # no line where there is something else to log to


def test_wandb_takes_the_current_run(monkeypatch):
    module = type(sys)("wandb")
    module.run = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", module)
    watched(every=12, wandb=True)
    assert len(module.run.logged) == 1


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [("wandb", {"wandb": True}, "wandb"),
     ("torch.utils.tensorboard", {"tensorboard": "tb"}, "tensorboard"),
     ("mlflow", {"mlflow": True}, "mlflow"), ("trackio", {"trackio": True}, "trackio")],
)  # fmt: skip
def test_missing_packages_name_their_extra(monkeypatch, module, options, extra):
    monkeypatch.setitem(sys.modules, module, None)
    run = watched(steps=0, keep_open=True)
    with pytest.raises(ImportError, match=rf"pip install 'inrun\[{extra}\]'"):
        inrun.log(run, **options)
    with pytest.raises(ValueError, match="at least 1"):
        inrun.log(run, every=0)
    run.close()


class Flow:
    """Stands for the module mlflow."""

    def __init__(self):
        self.metrics, self.texts = [], {}

    def log_metrics(self, metrics, step):
        self.metrics.append((step, metrics))

    def log_text(self, text, file):
        self.texts[file] = text


def test_the_suspects_are_those_of_the_table():
    writer, flow, wandb, trackio = Recorder(), Flow(), Recorder(), Recorder()
    run = watched(
        every=6, tensorboard=writer, mlflow=flow, wandb=wandb, trackio=trackio, suspects=3
    )
    wanted = run.harm().dropna().sort_values("harm", ascending=False).head(3)
    values = run.values().set_index("id")["value"]
    found = run.tally.suspects(3)
    assert [key for key, _, _ in found] == wanted["id"].tolist()
    assert [harm for _, harm, _ in found] == pytest.approx(wanted["harm"].tolist(), rel=1e-12)
    assert [v for _, _, v in found] == pytest.approx(values[wanted["id"]].tolist(), rel=1e-12)
    table = flow.texts["inrun/suspects.md"]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == [str(key) for key, _, _ in found]
    assert writer.texts["inrun/suspects"][-1] == (11, table)
    assert [step for step, _ in flow.metrics] == [5, 11]
    assert flow.metrics[-1][1]["inrun/explained"] == run.tally.explained
    assert wandb.logged[-1].keys() == trackio.logged[-1].keys() >= {"inrun/suspects", "inrun/step"}


@pytest.mark.parametrize(
    "values",
    [[[1.0, -2.0, 0.5], [0.0, -1.0, 3.0]], [[1.0, np.nan, -1.0], [2.0, 2.0, 2.0]],
     [[np.nan] * 3, [np.inf, 1.0, -2.0]], [[-1.0]]],
)  # fmt: skip
def test_harm_of_one_step_is_that_of_the_table(values):
    from inrun.ledger.entries import MemoryLedger, StepEntry
    from inrun.ledger.tables import harm_of

    values = np.array(values)
    names = [f"t{q}" for q in range(len(values))]
    ledger = MemoryLedger(names)
    ledger.append(StepEntry(0, np.arange(values.shape[1]), values[None], 0.1, 1.0))
    wanted = ledger.harm(0).dropna()
    counted, harms = harm_of(values)
    assert np.flatnonzero(counted).tolist() == wanted["id"].tolist()
    np.testing.assert_allclose(harms, wanted["harm"], rtol=1e-12)


def test_the_method_is_the_function(capsys):
    run = watched(steps=0, keep_open=True)
    assert run.log_to(every=1) is run and len(run.tally.listeners) == 1
    run.close()
