"""What the experiments share, against slow and obvious versions; resuming; the command."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments import EXPERIMENTS, load
from experiments.common import jobs, tasks
from experiments.common.game import coalition_losses, row_gradients, shapley
from experiments.common.markdown import unfinished
from experiments.common.parts import Context, Experiment, reproduce, select, write
from experiments.common.stacked import backward, losses, stacked, train
from experiments.common.statistics import interval
from inrun.cli.app import app
from inrun.exact import reference

ROOT = Path(__file__).parents[2]
CPU = Context(torch.device("cpu"))
SMALL = {"length": 8, "width": 8, "layers": 1, "heads": 2, "examples": 20, "validation": 3}


@pytest.mark.parametrize("name", ["adamw", "nadam", "rmsprop", "sgd", "sgd-momentum"])
def test_coalitions_side_by_side_take_the_real_step(name):
    task = tasks.make(SMALL | {"model": "gpt"}, CPU, torch.float64)
    optimizer = tasks.optimizer(name, task.model, 1e-2)
    for step in range(3):
        ids = torch.arange(4) + step
        if step in (0, 2):
            rows = row_gradients(task, ids)
            utility = reference.coalition_utility(
                task.model, optimizer, rows, lambda: task.loss(task.model, task.validation).item()
            )
            U = coalition_losses(task, optimizer, rows)
            for S in (0, 1, 6, 15):
                members = frozenset(i for i in range(4) if S >> i & 1)
                assert U[S] == pytest.approx(utility(members), rel=1e-12)
            np.testing.assert_allclose(
                shapley(U), reference.exact_shapley(4, utility), rtol=1e-7, atol=1e-14
            )
        task.loss(task.model, task.batch(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_stacked_training_is_training_one_by_one():
    task = tasks.make({"model": "mlp", "examples": 30, "validation": 5}, CPU, torch.float64)
    optimizer = tasks.optimizer("adamw", task.model, 1e-2)
    stack, twin = stacked(task.model, optimizer, 3)
    batches = torch.randint(0, 30, (4, 3, 5))
    for ids in batches:
        backward(task.model, task.loss, stack, task.batch(ids))
        twin.step()
    together = losses(task.model, task.loss, stack, task.validation)
    for copy in range(3):
        own = tasks.make({"model": "mlp", "examples": 30, "validation": 5}, CPU, torch.float64)
        optimizer = tasks.optimizer("adamw", own.model, 1e-2)
        for ids in batches[:, copy]:
            optimizer.zero_grad()
            own.loss(own.model, own.batch(ids)).backward()
            optimizer.step()
        assert float(together[copy]) == pytest.approx(own.loss(own.model, own.validation).item())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
# a smaller last batch is not recorded
@pytest.mark.parametrize(
    ("last", "compiled"),
    [(5, None), (3, None), (5, "aot_eager"), pytest.param(5, "inductor", marks=pytest.mark.slow)],
)
def test_a_training_loop_of_copies_is_its_steps(device, last, compiled, monkeypatch):
    """On a GPU the loop is a recorded graph; a warning that it is not would be an error here."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if compiled == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    context = Context(torch.device(device))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    order = [torch.randint(0, 30, (3, n)).to(device) for n in (5, 5, 5, last)]
    found = []
    for whole in (True, False):
        task = tasks.make({"model": "mlp", "examples": 30, "validation": 5}, context, torch.float64)
        stack, twin = stacked(task.model, tasks.optimizer("adamw", task.model, 1e-2), 3)
        if whole:
            train(
                task.model, task.loss, stack, twin, task.train, order, range(4),
                compiled=compiled is not None,
            )  # fmt: skip
        for ids in () if whole else order:
            backward(task.model, task.loss, stack, task.batch(ids))
            twin.step()
        found.append(stack)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs) == (
        compiled is not None
    )
    for k, w in found[0].items():
        torch.testing.assert_close(w, found[1][k])


def test_retraining_gives_every_coalition_its_own_members():
    from experiments.optimizer_dependence.games import train

    settings = {"model": "mlp", "optimizer": "sgd", "lr": 0.1, "group": 2, "batch": 3}
    task = tasks.make(settings | {"examples": 8, "validation": 5}, CPU, torch.float64)
    keys = torch.rand(6, 8)
    members = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    one, everything, again = train(task, settings, members, keys)
    assert one == again != everything
    task.train = (task.train[0].clone(), task.train[1])
    task.train[0][2:] += 1  # not a member's
    assert train(task, settings, members[:1], keys)[0] == pytest.approx(one)
    task.train[0][:2] += 1
    assert train(task, settings, members[:1], keys)[0] != pytest.approx(one)


def test_interval():
    one = interval([0.5, 0.7], [0, 0])
    assert one["mean"] == pytest.approx(0.6) and one["low"] is None
    two = interval([0.5, 0.7, 0.9], [0, 0, 1])
    assert two["low"] == pytest.approx(0.6) and two["high"] == pytest.approx(0.9)


def counted():
    """An experiment of two parts that counts how often they are done."""
    done = []

    def measure(settings, context):
        done.append(settings["x"])
        torch.set_default_dtype(torch.float32)
        if settings["x"] == "fails" and len(done) < 3:
            raise RuntimeError("interrupted")
        return {"x": settings["x"]}

    parts = {"a": {"x": 1}, "b": {"x": "fails"}}
    return done, Experiment("mine", "a claim", lambda size: parts, measure, dict, str)


def test_finished_parts_are_not_done_again(tmp_path):
    done, experiment = counted()
    with pytest.raises(RuntimeError, match="interrupted"):
        reproduce(experiment, out=tmp_path)
    assert torch.get_default_dtype() == torch.float64  # a part's settings end with it
    assert done == [1, "fails"]
    said = []
    first = reproduce(experiment, out=tmp_path, only=["a"], show=said.append)
    assert done == [1, "fails"] and first["missing"] == ["b"]
    assert any("missing" in line for line in said)
    summary = reproduce(experiment, out=tmp_path, show=said.append)
    assert done == [1, "fails", "fails"] and summary["missing"] == []
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["environment"]["torch"] == torch.__version__
    changed = replace(experiment, parts=lambda size: {"a": {"x": 2}})
    assert reproduce(changed, out=tmp_path, show=said.append)["summary"] == {"a": {"x": 2}}
    (tmp_path / "parts" / "a.json").write_text('{"half')
    assert reproduce(experiment, out=tmp_path, show=said.append)["missing"] == []
    with pytest.raises(ValueError, match="no part 'c'"):
        reproduce(experiment, out=tmp_path, only=["c"])


def test_a_name_that_others_begin_with_means_itself():
    experiment = replace(counted()[1], parts=lambda size: {"a-1": {}, "a-10": {}, "b": {}})
    assert list(select(experiment, "tiny", ["a-1"])) == ["a-1"]
    assert list(select(experiment, "tiny", ["a-"])) == ["a-1", "a-10"]


def test_parts_side_by_side_wait_for_what_they_need(tmp_path, monkeypatch):
    """With processes that are done as soon as they are asked for the second time."""
    parts = {name: {"name": name} for name in "abcd"}
    needs = {"a": ["c"], "b": [], "c": [], "d": ["a", "b"]}
    experiment = replace(
        counted()[1], parts=lambda size: parts, needs=lambda settings: needs[settings["name"]]
    )
    most = []

    class Process:
        def __init__(self, command, **_):
            self.name, self.polls = command[command.index("--only") + 1], 0
            most.append(len(side_by_side.running) + 1)

        def poll(self):
            self.polls += 1
            if self.polls < 2:
                return None
            record = {"settings": parts[self.name]}
            write(tmp_path / "parts" / f"{self.name}.json", record)
            return 0

    monkeypatch.setattr(jobs.subprocess, "Popen", Process)
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    said = []
    side_by_side = jobs.Jobs(experiment, "tiny", tmp_path, [], said.append)
    side_by_side.run(parts, jobs=2)
    assert [line for line in said if line.endswith("…")] == ["b …", "c …", "a …", "d …"]
    assert said.index("a …") > said.index("c: done") and said[-2:] == ["d …", "d: done"]
    assert max(most) == 2


@pytest.mark.slow
def test_real_processes_side_by_side_wait_for_what_they_need(tmp_path):
    said = []
    experiment = load("source-identification")
    pick = ["gpt-pretrained", "pretrain-gpt"]
    found = reproduce(experiment, "tiny", tmp_path, only=pick, show=said.append, jobs=2)
    begun = [line for line in said if line.endswith("…")]
    assert begun == ["pretrain-gpt …", "gpt-pretrained …"]  # in the order of what they need
    assert set(pick).isdisjoint(found["missing"]) and "gpt-pretrained: done" in said
    assert (tmp_path / "logs" / "gpt-pretrained.log").read_text()


def test_what_fails_side_by_side_is_told_with_its_log(tmp_path):
    experiment = load("source-identification")
    with pytest.raises(ValueError, match="not begun: gpt-pretrained, which need pretrain-gpt"):
        reproduce(experiment, "tiny", tmp_path, only=["gpt-pretrained"], show=str, jobs=2)
    data = tmp_path / "data"
    data.mkdir()  # without candidates
    with pytest.raises(ValueError, match=r"part gpt failed \(.*candidates\.txt.*logs.gpt\.log"):
        reproduce(experiment, "tiny", tmp_path, data, only=["gpt"], show=str, jobs=2)


def test_results_are_plain_json(tmp_path):
    with pytest.raises(ValueError):
        write(tmp_path / "x.json", {"x": float("nan")})
    assert not (tmp_path / "x.json").exists()


def test_too_few_examples_says_what_to_do():
    with pytest.raises(ValueError, match="pass --data DIR"):
        tasks.make(SMALL | {"model": "gpt", "examples": 10**6}, CPU, torch.float32)


def call(*args, code=0):
    result = CliRunner().invoke(app, ["reproduce", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def test_command(tmp_path):
    assert all(name in call("--list").output for name in EXPERIMENTS)
    assert "gpt2-small-seed0" in call("fidelity", "--size", "paper", "--list").output
    assert "no experiment 'nothing'" in call("nothing", code=2).stderr
    assert "--list" in call(code=2).stderr
    assert "tiny, smoke, paper" in call("ghost", "--size", "huge", code=2).stderr
    assert "not a folder" in call("ghost", "--data", tmp_path / "none", code=2).stderr
    out = call("ghost", "--size", "tiny", "--only", "gpt-float32", "--out", tmp_path).output
    assert "1 of 2 parts are missing" in out and (tmp_path / "parts/gpt-float32.json").exists()


def test_installed_package_says_to_clone(monkeypatch, tmp_path):
    monkeypatch.setattr("inrun.reproduce.__file__", str(tmp_path / "a" / "b" / "reproduce.py"))
    assert "clone the repository" in call("--list", code=2).stderr


def test_command_line_loads_without_the_store():
    code = "import sys; sys.modules['duckdb'] = None; import inrun.cli.app, experiments"
    path = f"{ROOT / 'src'}:{ROOT}"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_results_are_whole_or_say_so_and_small(name):
    experiment = load(name)
    page = (ROOT / "docs" / "reproduction" / f"{name}.md").read_text("utf-8")
    for size, data in experiment.committed().items():
        assert data["experiment"] == name and data["size"] == size
        assert not data["missing"] or unfinished({size: data}) in page
        assert (experiment.folder / f"{size}.json").stat().st_size < 300_000
        for figure in experiment.figures:
            assert (ROOT / "docs" / "images" / figure).exists()


def test_another_seed_is_another_model_on_the_same_examples():
    settings = {"model": "mlp", "examples": 9, "validation": 3}
    a, b = (tasks.make(settings | {"seed": s, "data_seed": 0}, CPU, torch.float64) for s in (0, 1))
    assert torch.equal(a.train[0], b.train[0]) and torch.equal(a.validation[0], b.validation[0])
    assert not torch.equal(a.model[1].weight, b.model[1].weight)
