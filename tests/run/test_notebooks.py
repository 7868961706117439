"""In a notebook: how a run looks, a ``watch`` cell that is run again, the line of progress."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import inrun
from inrun.run.attaching import open_runs
from inrun.run.logging import Progress


@pytest.fixture
def notebook(monkeypatch):
    ipython = ModuleType("IPython")
    ipython.get_ipython = object
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return ipython


def parts():
    model = nn.Linear(4, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def watch(model, optimizer, **options):
    return inrun.watch(
        model, optimizer, validation=[X[:5]], loss=lambda m, x: m(x).square().mean(), **options
    )


def step(run, model, optimizer, ids):
    with run.batch(ids):
        (model(X[: len(ids)]) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(ids=range(8), steps=3, **options):
    model, optimizer = parts()
    run = watch(model, optimizer, **options)
    for _ in range(steps):
        step(run, model, optimizer, ids)
    return run


def cells(page):
    return [row.split("</td>")[0] for row in page.split("<tr><td>")[1:]]


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_shows_both_ends_of_its_values(tmp_path, saved):
    run = trained(out=tmp_path / "run" if saved else None)
    pages = [run._repr_html_()]
    run.close()
    pages.append(run._repr_html_())
    if saved:
        pages.append(inrun.open(tmp_path / "run")._repr_html_())
    values = run.values()
    low, high = values.nsmallest(5, "value"), values.nlargest(5, "value")
    wanted = [*low[low["value"] < 0]["id"], *high[high["value"] > 0]["id"]]
    assert 5 <= len(wanted) <= 10
    for page in pages:
        assert cells(page) == [str(i) for i in wanted]
        assert f"{values['value'].max():.4g}" in page


def test_ids_are_shown_and_not_obeyed():
    run = trained(["<script>", "a\x1b[2J", "long" * 50, "ü"])
    page = run._repr_html_()
    run.close()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "\x1b" not in page and "long" * 16 not in page and "…" in page


def test_a_run_without_values_is_one_line():
    run = trained(steps=0)
    assert run._repr_html_() == "<code>inrun</code> nothing recorded yet"
    run.close()


def test_a_cell_that_is_run_again_replaces_its_run(notebook, capsys):
    model, optimizer = parts()
    first = watch(model, optimizer)
    step(first, model, optimizer, [1, 2])
    second = watch(model, optimizer)
    assert "closed after 1 step." in capsys.readouterr().out
    with pytest.raises(inrun.BatchError, match="closed"), first.batch([1]):
        pass
    step(second, model, optimizer, [1, 2, 3])
    assert len(first.values()) == 2 and len(second.values()) == 3  # the first is readable still
    other = watch(*parts())  # another model: nothing to replace
    found = [id(run) for run, _ in open_runs()]
    assert capsys.readouterr().out == "" and {id(second), id(other)} <= set(found)
    assert id(first) not in found
    second.close()
    other.close()
    assert not {id(second), id(other)} & {id(run) for run, _ in open_runs()}


def test_an_open_batch_is_given_up(notebook, capsys):
    model, optimizer = parts()
    first = watch(model, optimizer)
    first.begin([1, 2])
    model(X[:2]).sum().backward()
    optimizer.zero_grad()
    second = watch(model, optimizer)
    assert "closed after 0 steps." in capsys.readouterr().out
    step(second, model, optimizer, [5, 6])
    assert second.values()["id"].tolist() == [5, 6] and second.steps()["void"].isna().all()
    second.close()


def test_a_folder_that_is_written_is_taken_over(notebook, capsys, tmp_path):
    """Also where the model is new, because its cell was run again, too."""
    first = trained(out=tmp_path)
    model, optimizer = parts()
    second = watch(model, optimizer, out=tmp_path)
    said = capsys.readouterr().out
    assert "closed after 3 steps." in said and "pass overwrite=True" in said
    with pytest.raises(inrun.LedgerError, match="overwrite=True"):
        step(second, model, optimizer, [1])  # nothing that was recorded is lost unasked
    optimizer.zero_grad()
    assert len(first.values()) == 8
    third = watch(model, optimizer, out=tmp_path, overwrite=True)
    assert "overwrite" not in capsys.readouterr().out
    step(third, model, optimizer, [1])
    third.close()
    assert len(inrun.open(tmp_path).values()) == 1


@pytest.mark.parametrize("ipython", [None, "a library imported it"])
def test_in_a_script_it_is_refused_as_before(monkeypatch, ipython):
    if ipython:
        module = ModuleType("IPython")
        module.get_ipython = lambda: None
        monkeypatch.setitem(sys.modules, "IPython", module)
    model, optimizer = parts()
    first = watch(model, optimizer)
    with pytest.raises(RuntimeError, match="being watched already"):
        watch(model, optimizer)
    first.close()


def test_progress_says_what_is_left():
    now = iter([0.0, 10.0, 20.0, 90.0, 5.0, 6.0])
    progress = Progress(100, clock=lambda: next(now))
    tally = type("T", (), {"last": 9})()
    assert progress.of(tally) == "10% · "  # no pace yet
    tally.last = 19
    assert progress.of(tally) == "20%, 0:01:20 left · "
    tally.last = 29
    assert progress.of(tally) == "30%, 0:01:10 left · "
    tally.last = 99
    assert progress.of(tally) == "100% · "
    tally.last = 49  # back at a checkpoint
    assert progress.of(tally) == "50% · "
    assert Progress(None, clock=lambda: next(now)).of(tally) == ""


def test_the_line_of_progress(capsys):
    model, optimizer = parts()
    run = inrun.log(watch(model, optimizer), every=2, total=4)
    for _ in range(4):
        step(run, model, optimizer, [1, 2])
    run.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("50% · step 1 ·") and lines[1].startswith("100% · step 3 ·")
