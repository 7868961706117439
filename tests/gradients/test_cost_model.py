"""Ghost or materialise: what the cost model chooses, and that it can be overruled."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.capture.capture import Capture
from inrun.gradients import cost
from inrun.gradients.cost import MEMORY, Layer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

HALF, SINGLE = torch.bfloat16, torch.float32
ON = {"cpu": (SINGLE,), "cuda": (SINGLE, HALF)}
DEVICES = [(device, dtype) for device, dtypes in ON.items() for dtype in dtypes]
WIDTHS = [(128, 128), (768, 768), (768, 3072), (3072, 768), (768, 50257)]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("device, dtype", DEVICES)
def test_single_tokens_of_large_layers_stay_in_ghost_form(device, dtype, fast):
    for I, O in WIDTHS:  # noqa: E741
        for B in (1, 4, 64, 1024):
            layer = Layer(B, 1, I, O, dtype, device)
            large = B * I * O * dtype.itemsize > cost.SMALL
            if large:
                assert not cost.materialise(layer, fast)


@pytest.mark.parametrize("device, dtype", DEVICES)
def test_long_sequences_are_materialised(device, dtype):
    for I, O in WIDTHS:  # noqa: E741
        assert cost.materialise(Layer(16, 1024, I, O, dtype, device), fast=True)


def crossover(device, dtype):
    """The least T from which on materialised gradients of a large layer are quicker."""
    for T in range(1, 4096):
        ghost, dense = cost.seconds(Layer(64, T, 3072, 3072, dtype, device), fast=True)
        if dense <= ghost:
            return T
    return None


def test_longer_sequences_pay_on_a_gpu_than_on_a_cpu():
    assert 4 <= crossover("cpu", SINGLE) <= 100
    assert 128 <= crossover("cuda", HALF) < 1024
    assert crossover("cuda", SINGLE) < crossover("cuda", HALF)


@pytest.mark.parametrize("fast", [True, False])
def test_small_batches_in_eager_mode_leave_the_host_alone(fast):
    """There the GPU waits for the host. A long batch keeps it busy, and then its work decides."""
    for B, T in ((8, 256), (4, 512)):
        for I, O in ((768, 768), (768, 3072), (3072, 768)):  # noqa: E741
            assert not cost.materialise(Layer(B, T, I, O, HALF, "cuda", eager=True), fast)
    assert cost.materialise(Layer(8, 1024, 2048, 16, HALF, "cuda", eager=True), fast)
    for I, O in ((768, 768), (768, 3072), (3072, 768), (768, 50257)):  # noqa: E741
        assert cost.materialise(Layer(16, 1024, I, O, HALF, "cuda", eager=True), fast=True)


def test_what_is_remembered_is_small_and_for_few_directions():
    assert cost.remember(cost.SMALL, 1) and not cost.remember(cost.SMALL + 1, 1)
    assert cost.remember(1, cost.FEW) and not cost.remember(1, cost.FEW + 1)


@pytest.mark.parametrize("device, dtype", DEVICES)
def test_more_tokens_never_speak_for_ghost(device, dtype):
    for I, O in WIDTHS:  # noqa: E741
        layers = [Layer(512, T, I, O, dtype, device) for T in (1, 4, 16, 64, 256, 1024, 4096)]
        chosen = [cost.materialise(x, fast=True) for x in layers]
        assert chosen == sorted(chosen)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("device, dtype", DEVICES)
@pytest.mark.parametrize("quicker", ["ghost", "dense"])
def test_neither_form_keeps_many_times_what_the_other_does(
    device, dtype, fast, quicker, monkeypatch
):
    slow = dict.fromkeys({"ghost": ["dense"], "dense": ["ghost"]}[quicker], 1e3)
    rates = {k: replace(r, **slow) for k, r in cost.RATES.items()}
    monkeypatch.setattr(cost, "RATES", rates)
    seen = set()
    for T in (1, 2, 8, 64, 1024, 4096, 2**16):
        layer = Layer(64, T, 2048, 2048, dtype, device)
        kept = {True: layer.I * layer.O, False: T * (layer.I + layer.O)}
        chosen = cost.materialise(layer, fast)
        assert kept[chosen] <= MEMORY * kept[not chosen]
        within = max(kept.values()) <= MEMORY * min(kept.values())
        if within:  # then time decides
            assert chosen == (quicker == "dense")
        seen.add(within)
    assert seen == {True, False}


@pytest.mark.parametrize("device, dtype", DEVICES)
def test_more_directions_never_speak_for_ghost(device, dtype):
    """And some make the difference: a ghost pays a product for each, T times as large as that with
    gradients (so not at T = 1)."""
    turned = 0
    for I, O in WIDTHS:  # noqa: E741
        for T in (4, 16, 64, 256):
            layers = [Layer(16, T, I, O, dtype, device, Q) for Q in (1, 2, 8, 64, 1024)]
            chosen = [cost.materialise(x, fast=True) for x in layers]
            assert chosen == sorted(chosen)
            turned += chosen[0] != chosen[-1]
    assert turned >= 3


def test_neither_do_many_directions_allow_any_memory():
    layer = Layer(64, 1, 3072, 3072, HALF, "cuda", Q=10_000)
    assert layer.I * layer.O > cost.MEMORY * cost.MANY * layer.T * (layer.I + layer.O)
    assert not cost.materialise(layer, fast=True)


def test_targets_and_estimators_are_counted():
    """A layer whose form they decide."""
    B, T, width = 4, 2, 256
    one, many = (Layer(B, T, width, width, SINGLE, "cpu", Q, eager=True) for Q in (1, 24))
    assert not cost.materialise(one, True) and cost.materialise(many, True)
    torch.manual_seed(0)
    x = torch.randn(B, T, width, dtype=SINGLE)

    def loss(model, batch):
        return model(batch).square().mean()

    for targets, estimators, kind in (
        (1, ["secant"], "remembered"),
        (12, ["secant", "sgd"], "dense"),
    ):
        model = nn.Linear(width, width, bias=False, dtype=SINGLE)
        optimizer = torch.optim.AdamW(model.parameters())
        named = {f"t{q}": [torch.randn(1, T, width, dtype=SINGLE)] for q in range(targets)}
        run = inrun.watch(
            model, optimizer, targets=named, loss=loss, estimator=estimators, training="fast"
        )
        with run.batch(range(B)):
            loss(model, x).backward()
        optimizer.step()
        assert run.coverage()["forms"].tolist() == [kind]
        run.close()


def test_bitwise_training_pays_for_both_gradients():
    layer = Layer(16, 512, 768, 768, HALF, "cuda")
    fast, bitwise = cost.seconds(layer, True), cost.seconds(layer, False)
    assert fast[1] - fast[0] < bitwise[1] - bitwise[0]


def test_other_devices_and_types_have_rates_too():
    assert cost.rates_of(Layer(1, 1, 1, 1, torch.float64, "mps")) == cost.RATES["cuda", False]
    assert cost.rates_of(Layer(1, 1, 1, 1, HALF, "xpu")) == cost.RATES["cuda", True]
    assert cost.rates_of(Layer(1, 1, 1, 1, HALF, "cpu")) == cost.RATES["cpu", False]


def kinds(model, x, **options):
    """The kind of record kept for each weight."""
    params = dict(model.named_parameters())
    capture = Capture(model, params, **options)
    with capture.batch(len(x)) as micro:
        model(x).square().mean().backward()
    return {n.name: type(r[0]).__name__ for n, r in micro.records.items() if n.name != "bias"}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("T", [1, 64, 512])
def test_forced_forms_win(T, fast):
    model, x = nn.Linear(48, 48), torch.randn(4, T, 48)
    assert kinds(model, x, form="ghost", fast=fast)["weight"] == "Pair"
    assert kinds(model, x, form="materialise", fast=fast)["weight"] == "Dense"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("answer", [True, False])
def test_the_capture_asks_the_model(answer, fast, monkeypatch):
    asked = []

    def materialise(layer, fast):
        asked.append((layer, fast))
        return answer

    monkeypatch.setattr(cost, "materialise", materialise)
    model, x = nn.Linear(5, 7).float(), torch.randn(3, 2, 5, dtype=SINGLE)
    assert kinds(model, x, fast=fast)["weight"] == ("Dense" if answer else "Pair")
    layer = Layer(3, 2, 5, 7, SINGLE, "cpu", eager=True)
    assert asked == [(layer, fast)]  # once, not again in the backward


def test_autocast_decides_the_type(monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "materialise", lambda layer, fast: asked.append(layer) or True)
    model, x = nn.Linear(5, 7).float(), torch.randn(3, 2, 5, dtype=SINGLE)
    with torch.autocast("cpu", dtype=HALF):
        kinds(model, x)
    assert [layer.dtype for layer in asked] == [HALF]


@pytest.mark.parametrize("form", ["auto", "grouped"])
def test_many_directions_are_worth_the_gradients_of_a_convolution(form):
    """In ghost form it runs again for each of them; a look-up does not."""
    model, x = nn.Conv2d(4, 8, 3), torch.randn(3, 4, 5, 5)  # 200 numbers in ghost form, 288
    assert kinds(model, x, form=form)["weight"] == "Replay"
    assert kinds(model, x, form=form, directions=2)["weight"] == "Dense"
    large = nn.Conv2d(4, 8, 3), torch.randn(3, 4, 3, 3)  # 72 and 288
    assert kinds(*large, form=form, directions=3)["weight"] == "Replay"
    assert kinds(*large, form=form, directions=30)["weight"] == "Dense"
    table, ids = nn.Embedding(9, 4), torch.zeros(3, 2, dtype=torch.long)
    assert kinds(table, ids, form=form, directions=30)["weight"] == "Lookup"


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7))

    def forward(self, x):
        return F.relu(x) @ self.weight


@pytest.mark.parametrize("model", [nn.Linear(5, 7), Turned()])
def test_shapes_of_all_spellings(model, monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "materialise", lambda layer, fast: asked.append(layer) or True)
    kinds(model.double(), torch.randn(3, 2, 5, dtype=torch.float64))
    assert asked == [Layer(3, 2, 5, 7, torch.float64, "cpu", eager=True)]


def test_compiled_graphs_choose_alike(monkeypatch):
    asked = []

    def materialise(layer, fast):
        asked.append((layer, fast))
        return True

    monkeypatch.setattr(cost, "materialise", materialise)
    torch.compiler.reset()
    model, x = nn.Linear(5, 7).float(), torch.randn(3, 2, 5, dtype=SINGLE)
    compiled = torch.compile(model, backend="aot_eager")
    capture = Capture(compiled, dict(model.named_parameters()))
    with capture.batch(len(x)) as micro:
        compiled(x).square().mean().backward()
    assert {type(r[0]).__name__ for r in micro.records.values()} == {"Dense"}
    assert asked == [(Layer(3, 2, 5, 7, SINGLE, "cpu"), True)]  # planned once, as a sum
    torch.compiler.reset()


# The benchmark and the tables of docs/costs.md


def test_the_benchmark_measures_and_fits():
    import cost_model

    layers = [Layer(2, T, 8, 16, SINGLE, "cpu") for T in (1, 8, 32)]
    points = [cost_model.measure(x, seconds=0.01) for x in layers]
    points = [p | {"choices": cost_model.judged(p)} for p in points]
    assert [cost_model.layer_of(json.loads(json.dumps(p))) for p in points] == layers
    assert all(c["loss"] >= 1 for p in points for c in p["choices"])
    assert set(cost_model.summary(points)) == {"float32, fast", "float32, bitwise"}
    assert cost_model.fitted(points).products > 0


def test_a_fit_finds_the_rates_that_made_the_times():
    import cost_model

    points = []
    for layer in cost_model.grid("cuda", HALF):
        ghost, dense = cost.seconds(layer, True)
        ms = {"ghost": 1e3 * ghost, "materialise, fast": 1e3 * dense, "materialise, bitwise": 1.0}
        points.append(vars(layer) | {"dtype": "bfloat16", "ms": ms})
    found, true = cost_model.fitted(points), cost.RATES["cuda", True]
    for name, value in vars(true).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.05)


def test_tables_say_what_is_not_measured(tmp_path, monkeypatch):
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in ("costs-gpu", "costs-cpu", "scaling-gpu", "scaling-cpu", "targets-compiled",
                 "stages", "precision", "choices"):  # fmt: skip
        assert "Not measured yet" in tables.TABLES[name]()


def run_of(options, plain, fast, **row):
    """A result as ``inrun.bench`` gives it."""
    blank = {"mode": options["mode"], "status": "ok", "peak_bytes": None, "memory_ratio": None,
             "verify": None, "stages_ms": {}, "ratio": 1.0} | row  # fmt: skip
    stages = {"update map": 1.0, "validation": 2.0, "contraction": 3.0, "whole step": fast}
    rows = [
        blank | {"variant": "plain", "step_ms": {"median": plain}},
        blank | {"variant": "fast", "step_ms": {"median": fast}, "stages_ms": stages,
                 "ratio": plain / fast},
    ]  # fmt: skip
    return {
        "options": {"model": "gpt2", "batch": 16, "length": 1024, "targets": 1, "validation": 1,
                    "dtype": "bf16"} | options,
        "parameters": 124_000_000, "rows": rows, "date": "2025-01-01T00:00:00",
        "hardware": {"gpu": "NVIDIA H200", "cpu": "a CPU", "threads": 2},
        "versions": {"torch": "2.11"},
    }  # fmt: skip


def test_tables_of_results(tmp_path, monkeypatch):
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    eager = run_of({"mode": "eager"}, 40.0, 50.0, peak_bytes=2e9)
    runs = {
        "gpt2": eager,
        "gpt2-compile": run_of({"mode": "compile"}, 30.0, 40.0),
        "batch-4": run_of({"mode": "eager", "batch": 4}, 10.0, 20.0),
        "batch-64": {"skipped": "the time was used up"},
        "hf-gpt2": {"failed": "ValueError: no"},
    }
    (tmp_path / "costs-h200.json").write_text(json.dumps({"note": "quiet", "runs": runs}))
    gpu = tables.TABLES["costs-gpu"]()
    assert "| gpt2 | eager | `fast` | 50.0 | 80% | 2.0 |" in gpu and "H200" in gpu
    assert "quiet" in gpu
    scaling = tables.TABLES["scaling-gpu"]()
    assert "| batch of 4 | 10.0 | 20.0 | 50% |" in scaling and "batch of 64" not in scaling
    stages = tables.TABLES["stages"]()
    assert "| validation pass | 1.7 | 0.82 | 1.04 | 2.00 | 2.00 |" in stages
    assert "4.00 (with the sum)" in stages  # 50 − 40 − (1 + 2 + 3)
