"""Every experiment at its smallest size, and what it has to show even there."""

import pytest

from experiments import EXPERIMENTS, efficiency, load, overview
from experiments.common.game import ESTIMATORS
from helpers.tiny_experiment import run


def test_fidelity_orders_the_estimators(tmp_path):
    summary = run("fidelity", tmp_path)
    late = [c for c in summary["cells"] if c["stage"] == "100+"]
    assert {c["model"] for c in late} == {"gpt", "encoder", "convnet"}
    for c in late:
        R = {e: c[e]["R"]["mean"] for e in ESTIMATORS}
        assert R["secant"] >= R["tangent"] >= R["sgd"], c["model"]
        assert R["secant"] >= 0.999
    assert summary["goals"]["probes"] and not summary["goals"]["missed"]


def test_learning_rates_keep_the_order(tmp_path):
    for c in run("learning-rates", tmp_path)["cells"]:
        assert c["secant"]["R"] >= c["tangent"]["R"] >= c["sgd"]["R"]
        assert c["secant"]["R"] >= 0.999 and c["secant"]["error"] <= 0.03


def test_ghost_is_the_materialised_score(tmp_path):
    summary = run("ghost", tmp_path)
    for form in ("ghost", "materialise"):
        assert summary["gpt-float32"]["against"][f"{form}, same"]["R"] >= 0.99998
        assert summary["gpt-bfloat16"]["against"][f"{form}, same"]["R"] >= 0.999


def test_the_adds_up_experiment_finds_that_values_add_up(tmp_path):
    for c in run("adds-up", tmp_path).values():
        off = {e: abs(c["explained"][e] - 1) for e in ESTIMATORS}
        assert off["secant"] <= 0.02 and off["secant+gauss2"] <= 0.02
        assert off["secant"] < off["tangent"] < off["sgd"]
        whole = c["batch_share"] + c["momentum_share"]
        assert c["loss"][0] - c["loss"][1] == pytest.approx(whole, rel=1e-3)


def test_efficiency_stands_beside_the_paper(tmp_path, monkeypatch):
    (part,) = run("efficiency", tmp_path).values()
    rows = {r["variant"]: r for r in part["rows"]}
    assert list(rows) == list(efficiency.VARIANTS)
    assert all(r["status"] == "ok" and r["ratio"] > 0 for r in rows.values())
    assert rows["plain"]["ratio"] == 1 and rows["plain"]["memory_ratio"] is None
    rows["fast"] |= {"ratio": 0.875, "ratio_range": [0.87, 0.88], "memory_ratio": 1.28}
    rows["direct-vmap"]["status"] = "out of memory"
    text = efficiency.table({"paper": {"summary": {"gpt2": part}}})
    assert "| Adam-Ghost | `fast` | 43.9% | 87.5% (87.0% to 88.0%) | 225% | 128% |" in text
    assert "| `direct-vmap` | 19.6% | out of memory | 733% | out of memory |" in text
    part["model"] = "gpt2"
    (row,) = overview.efficiency({"gpt2": part})
    assert "(eager)" in row[0] and row[1] == "43.9%" and row[3].startswith("87.5%")
    measured = efficiency.table({})  # by benchmarks/costs.py
    assert "| Adam-Ghost | `fast` | 43.9% |" in measured and "not yet measured" not in measured
    monkeypatch.setattr(efficiency, "ROOT", tmp_path)
    assert efficiency.table({}).count("not yet measured") == len(efficiency.VARIANTS)


def test_accumulated_values_of_the_estimators_differ(tmp_path):
    pairs = run("accumulated", tmp_path)["convnet-seed0"]["pairs"]
    assert set(pairs) == {"tangent / sgd", "tangent / secant", "sgd / secant"}
    assert all(-1 <= c["spearman"] < 0.999 for c in pairs.values())


def test_optimizer_dependence_has_a_ceiling(tmp_path):
    summary = run("optimizer-dependence", tmp_path)
    assert set(summary) == {"along, gpt", "retrain, mlp"}
    for c in summary.values():
        assert {"across", "ceiling_sgd", "ceiling_adamw", "corrected"} <= set(c["pearson"])
        assert c["sgd"]["loss"][1] < c["sgd"]["loss"][0]
        assert c["adamw"]["loss"][1] < c["adamw"]["loss"][0]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_parts_have_names_and_plain_settings(name):
    import json

    for size in ("tiny", "smoke", "paper"):
        parts = load(name).parts(size)
        assert parts
        for part, settings in parts.items():
            assert part == part.lower() and "/" not in part and " " not in part
            assert json.loads(json.dumps(settings)) == settings
