"""The command line: what it prints, and one clear line for bad input."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from inrun.cli.app import app
from inrun.ledger.entries import Audit, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.tables import HALVES
from inrun.report import metrics


def make_run(path, seed=0, kind=int):
    rng = np.random.default_rng(seed)
    store = Store.create(path, {"seed": seed}, ["math", "code"], ["secant", "sgd"])
    store.update_info(coverage={"share": 0.5})
    for step in range(30):
        ids = rng.choice(50, 8, replace=False)
        values = rng.normal(size=(2, 2, 8)) * 1e-3 + (ids - 25) * 1e-4
        audit = Audit(np.full(2, 2.0), np.full(2, 1.9), np.full(2, 1.8)) if step % 10 == 0 else None
        named = ids if kind is int else np.array([f"x{i}" for i in ids], object)
        store.append(StepEntry(step, named, values if step else None, 0.1, audit=audit))
    store.close()
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("cli") / "run")


def call(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output + result.stderr
    return result


def asked(*args):
    return json.loads(call(*args, "--json").stdout)


def test_help_and_version():
    text = call("--help").stdout
    for command in ("info", "top", "compare", "prune", "report"):
        assert command in text
        assert len(call(command, "--help").stdout) > 300
    assert call("--version").stdout.startswith("inrun ")


def test_info_says_what_the_ledger_holds(run):
    text = call("info", run).stdout
    assert "2: math, code" in text and "explained" in text and "50.0% of the parameters" in text
    facts = asked("info", run)
    assert facts["steps"] == 30 and facts["scored_steps"] == 29 and facts["audited"] == 2
    assert facts["batch_share"] == pytest.approx(0.2)
    assert facts["info"]["config"] == {"seed": 0}


def test_top_lists_the_best_and_the_worst(run, tmp_path):
    values = open_run(run).values().sort_values("value")
    best, worst = asked("top", run, "-n", 3), asked("top", run, "-n", 3, "--worst")
    assert [r["id"] for r in best] == values["id"].tolist()[:-4:-1]
    assert [r["id"] for r in worst] == values["id"].tolist()[:3]
    code = asked("top", run, "--target", "code", "--estimator", "sgd", "-n", 1)
    other = open_run(run).values("sgd")
    assert code[0]["id"] == other.loc[other["code"].idxmax(), "id"]
    harm = open_run(run).harm().sort_values("harm", ascending=False)
    assert [r["id"] for r in asked("top", run, "--by", "harm")] == harm["id"].tolist()[:20]
    table = pd.DataFrame(
        {"id": np.arange(50), "text": [f"\x1b[2Jtext [red]{i}" for i in range(50)]}
    )
    table.to_csv(tmp_path / "e.csv", index=False)
    text = call("top", run, "--examples", tmp_path / "e.csv").stdout
    assert f"text [red]{best[0]['id']}" in text and "\x1b" not in text
    rows = asked("top", run, "--examples", tmp_path / "e.csv")
    assert rows[0]["text"] == f"\x1b[2Jtext [red]{best[0]['id']}"


def test_compare_gives_the_metrics_of_two_runs(run, tmp_path):
    other = make_run(tmp_path / "other", seed=1)
    found = asked("compare", run, other)
    both = open_run(run).values().merge(open_run(other).values(), on="id")
    assert found["pearson"] == pytest.approx(metrics.pearson(both["value_x"], both["value_y"]))
    assert found["k"] == len(both) // 10
    same = asked("compare", run, run, "-k", 7)
    assert (same["pearson"], same["spearman"], same["bottom_overlap"]) == (1, 1, 1)
    two = asked("compare", run, run, "--estimator-b", "sgd", "--by", "harm")
    assert 0 < two["spearman"] < 1
    assert "bottom 7 in common: 100.0%" in call("compare", run, run, "-k", 7).stdout
    strings = make_run(tmp_path / "strings", kind=str)
    assert "different kinds of ids" in call("compare", run, strings, code=2).stderr


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "txt"])
def test_prune_removes_the_lowest_values(run, tmp_path, suffix):
    file = tmp_path / f"keep.{suffix}"
    result = asked("prune", run, "--ratio", 0.2, "--by", "value", "-o", file)
    values = open_run(run).values()
    n = len(values)
    assert result == {
        "examples": n, "removed": n // 5, "kept": n - n // 5, "output": str(file)
    }  # fmt: skip
    kept = {
        "parquet": lambda: pd.read_parquet(file)["id"].tolist(),
        "csv": lambda: pd.read_csv(file)["id"].tolist(),
        "json": lambda: json.loads(file.read_text()),
        "txt": lambda: [int(x) for x in file.read_text().split()],
    }[suffix]()
    scored = values.dropna()
    worst = set(scored.nsmallest(n // 5, "value")["id"])
    assert kept == [i for i in values["id"] if i not in worst]


def test_prune_takes_other_orders(run, tmp_path):
    def kept(*args):
        call("prune", run, "--ratio", 0.1, "-o", tmp_path / "k.parquet", "--force", *args)
        return set(pd.read_parquet(tmp_path / "k.parquet")["id"])

    everything = set(open_run(run).values()["id"])
    harm = open_run(run).harm().nlargest(round(len(everything) / 10), "harm")["id"]
    assert everything - kept("--by", "harm") == set(harm)
    top = open_run(run).values().nlargest(round(len(everything) / 10), "value")["id"]
    assert everything - kept("--which", "top", "--by", "value") == set(top)
    random = [kept("--which", "random", "--seed", s) for s in (1, 1, 2)]
    assert random[0] == random[1] != random[2]


@pytest.fixture(scope="module")
def signalled(tmp_path_factory):
    """Four epochs over 20 examples with signals; 3 and 7 are fitted badly throughout."""
    path = tmp_path_factory.mktemp("cli") / "signals"
    store = Store.create(path, {}, ["math", "code"], ["secant"])
    rng = np.random.default_rng(0)
    for step in range(8):
        ids = np.arange(20)[step % 2 :: 2]
        bad = np.isin(ids, (3, 7))
        loss = np.where(bad, 4.0, 0.5) + 0.1 * rng.random(10)
        signals = np.stack([loss, 1 - np.exp(-loss), 1 - loss, ids % 2])
        store.append(StepEntry(step, ids, rng.normal(size=(1, 2, 10)), 0.1, signals=signals))
    store.close()
    return str(path)


def test_suspects_are_those_of_the_run(signalled):
    found = asked("suspects", signalled, "-n", 2)
    assert {s["id"] for s in found["suspects"]} == {3, 7} and found["sure"] == 0
    assert found["window"] == open_run(signalled).suspects().attrs["window"]
    text = " ".join(call("suspects", signalled).stdout.split())
    assert "steps 0 to 7" in text and "values: none is sure to be wrong" in text
    assert "no label stands out" in text


def test_prune_takes_sure_suspects_then_the_easiest(signalled, tmp_path, monkeypatch):
    monkeypatch.setattr("inrun.ledger.suspects._confidence", lambda score, *_: score.rank() > 18)

    def gone(*args):
        call("prune", signalled, "--ratio", 0.2, "-o", tmp_path / "k.csv", "--force", *args)
        return set(range(20)) - set(pd.read_csv(tmp_path / "k.csv")["id"])

    table = open_run(signalled).suspects()
    rest = table[~table["id"].isin((3, 7))].sort_values("el2n")
    easiest = {int(rest[rest["label"] == c]["id"].iloc[0]) for c in (0, 1)}
    assert gone() == {3, 7} | easiest
    assert gone("--by", "noisy") == set(table["id"][:4])
    assert {3, 7}.isdisjoint(gone("--by", "clean"))


def test_prune_takes_near_duplicates_before_the_easiest(signalled, tmp_path):
    """Of each group all but the least suspicious; an example in no group is nobody's duplicate."""
    table, file = open_run(signalled).suspects(), tmp_path / "groups.csv"
    ids = table["id"].tolist()  # the most suspicious first
    group = dict.fromkeys((ids[2], ids[5], ids[9]), "a") | {ids[4]: "b", ids[6]: "b"}
    rows = [f"{i},{group.get(i, '')}\n" for i in sorted(ids)]
    file.write_text("id,group\n" + "".join(rows))

    def gone(*args):
        options = ("--by", "clean", "--groups", file, "-o", tmp_path / "k.csv", "--force")
        call("prune", signalled, *options, *args)
        return set(range(20)) - set(pd.read_csv(tmp_path / "k.csv")["id"])

    assert gone("--ratio", 0.15) == {ids[2], ids[4], ids[5]}
    some = gone("--ratio", 0.25)
    assert len(some) == 5 and {ids[2], ids[4], ids[5]} < some
    file.write_text("id,text\n" + "".join(f"{i},x\n" for i in ids))
    refused = ("prune", signalled, "--ratio", 0.1, "--by", "clean", "--groups", file)
    assert "'group'" in call(*refused, "-o", tmp_path / "l.csv", code=2).stderr
    for other in (("--by", "noisy"), ("--which", "random")):
        wrong = call("prune", signalled, "--ratio", 0.1, "--groups", file, *other, code=2)
        assert "--groups goes with" in wrong.stderr


def test_a_report_of_a_window(signalled, tmp_path):
    options = ("--since", 2, "--until", 6, "--half-life", 3)
    call("report", signalled, "-o", tmp_path / "r.html", *options)
    said = "values only from step 2 on, before step 6, half for each 3 steps of age"
    assert said in (tmp_path / "r.html").read_text("utf-8")


def test_a_ranking_says_how_steady_it_is(tmp_path):
    store = Store.create(tmp_path / "run", {}, list(HALVES), ["secant"])
    first, second = np.arange(8.0), np.array([0, 2, 1, 3, 4, 5, 7, 6.0])  # Spearman 20 / 21
    store.append(StepEntry(0, np.arange(8), np.stack([first, second])[None], 0.1))
    store.close()
    text = " ".join(call("top", tmp_path / "run", "-n", 2).stdout.split())
    assert "steadiness of the ranking by value: 0.98, from two halves" in text and "0.95" in text
    assert "steadiness" not in call("top", tmp_path / "run", "--by", "harm").stdout


def test_windows_and_epochs(signalled):
    assert [e["since"] for e in asked("epochs", signalled)] == [0, 2, 4, 6]
    options = ("--since", 2, "--until", 6, "--half-life", 3)
    found = asked("top", signalled, "-n", 5, *options)
    wanted = open_run(signalled).values(since=2, until=6, half_life=3).nlargest(5, "value")
    assert [f["id"] for f in found] == wanted["id"].tolist()
    assert {f["id"] for f in asked("top", signalled, "-n", 2, "--by", "el2n")} == {3, 7}
    same = asked("compare", signalled, signalled, "--by", "margin")
    assert same["spearman"] == pytest.approx(1.0)


def test_prune_without_signals_says_what_to_do(run):
    assert "cross_entropy" in call("prune", run, "--ratio", 0.1, code=2).stderr


def test_report_writes_a_page(run, tmp_path):
    assert "MB" in call("report", run, "-o", tmp_path / "r.html").stdout
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.txt").write_text("x")
    cut = make_run(tmp_path / "cut")
    file = next((tmp_path / "cut" / "values").iterdir())
    file.write_bytes(file.read_bytes()[:-50])
    (tmp_path / "e.jsonl").write_text('{"id": "a", "text": "t"}\n')
    (tmp_path / "broken.jsonl").write_text("{nonsense\n")
    cases = {
        ("info", tmp_path / "nowhere"): "no such folder",
        ("info", tmp_path / "foreign"): "is not a ledger of inrun",
        ("top", cut): f"{file} is damaged",
        ("info", cut): f"{file} is damaged",
        ("report", cut, "-o", tmp_path / "r.html"): f"{file} is damaged",
        ("top", run, "--examples", tmp_path / "e.jsonl"): "no id of the run is in",
        ("report", run, "--examples", tmp_path / "e.jsonl"): "the file 'a'",
        ("report", run, "--examples", tmp_path / "broken.jsonl"): "cannot be read as jsonl",
        ("report", run, "--examples", tmp_path / "none.csv"): "no such file",
        ("report", run, "--examples", file.with_name("x.pickle")): "no such file",
        ("top", run, "--target", "poetry"): "no target 'poetry'",
        ("top", run, "--estimator", "magic"): "estimator 'magic' was not recorded",
        ("prune", run, "--ratio", 0): "--ratio must lie between 0 and 1, not 0",
        ("prune", run, "--ratio", 1.5): "not 1.5",
        ("prune", run, "--ratio", 0.1, "-o", "keep.xlsx"): "write .parquet, .csv",
        ("compare", run, run, "-k", 10_000): "k must be between 1 and",
    }
    for args, message in cases.items():
        result = call(*args, code=2)
        assert message in result.stderr, args
        assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
        assert result.stdout == ""
