"""The LDS benchmark: its measures against obvious versions, and a run at small size."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.lds import (
    clock,
    cost,
    gradients,
    inside,
    measures,
    ours,
    problems,
    removal,
    retrain,
    rivals,
    truth,
)
from benchmarks.lds import projected as projection
from benchmarks.lds.__main__ import measured
from benchmarks.lds.curvature import Curvature, Factors, ekfac
from benchmarks.lds.problems import Problem, problem
from benchmarks.lds.without import main as without
from benchmarks.lds.without import merged
from experiments.common import encoder

CPU = torch.device("cpu")


def linear(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def small() -> Problem:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (16,), generator=g)
    return Problem("small", linear, losses, (x[:12], y[:12]), (x[12:], y[12:]), 4, 2, 1e-2, chunk=5)


def test_ranks_and_correlation_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = torch.randn(20, 3).round(decimals=1), torch.randn(20, 3).round(decimals=1)
    expected = [stats.spearmanr(a[:, k], b[:, k]).statistic for k in range(3)]
    assert measures.spearman(a, b).tolist() == pytest.approx(expected, abs=1e-12)


def test_lds_of_the_outcome_itself_is_one() -> None:
    g = torch.Generator().manual_seed(0)
    credit, masks = torch.randn(10, 2, generator=g), retrain.halves(10, 30)
    found = measures.lds([credit], masks, -measures.predicted(credit, masks), draws=20)
    assert found["mean"] == pytest.approx(1) and found["low"] == pytest.approx(1)
    turned = measures.lds([-credit], masks, -measures.predicted(credit, masks), draws=5)
    assert turned["mean"] == pytest.approx(-1)


def test_halves_have_half_of_the_rows() -> None:
    masks = retrain.halves(11, 6)
    assert masks.sum(1).tolist() == [5] * 6
    assert len({tuple(m.tolist()) for m in masks}) == 6


def test_retrainings_side_by_side_are_single_trainings(small: Problem, tmp_path: Path) -> None:
    masks = retrain.halves(12, 3)
    found, _ = retrain.outcomes(small, masks, 1, tmp_path, together=3)
    for k, mask in enumerate(masks):
        model = small.make(1_000_000 + k)
        optimizer = small.optimizer(model)
        for ids in small.order(mask.nonzero()[:, 0], 1_000_000 + k):
            assert mask[ids].all()
            small.loss(model, tuple(x[ids] for x in small.train)).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = small.losses(model, small.queries)
        torch.testing.assert_close(found[0, k], expected.detach(), rtol=1e-9, atol=1e-9)
    again, _ = retrain.outcomes(small, masks, 1, tmp_path, together=3)
    assert torch.equal(again, found) and len(list(tmp_path.iterdir())) == 1


def test_per_example_gradients_are_those_of_single_rows(small: Problem) -> None:
    model = small.make(0)
    found = gradients.all_rows(small, model, gradients.weights_of(model), small.train)
    for i in range(small.examples):
        loss = small.losses(model, tuple(x[i : i + 1] for x in small.train)).sum()
        for g, (name, _) in zip(
            torch.autograd.grad(loss, list(model.parameters())),
            model.named_parameters(),
            strict=True,
        ):
            torch.testing.assert_close(found[name][i], g, rtol=1e-9, atol=1e-12)


def test_ekfac_with_one_sided_identity_is_a_diagonal_and_its_inverse_is_exact(
    small: Problem,
) -> None:
    """(F + λ)u = v in the basis of the eigenvectors: u is v where F is turned back."""
    model = small.make(0)
    weights = gradients.weights_of(model)
    curvature = ekfac(small, model, weights, [small.train])
    v = gradients.all_rows(small, model, weights, small.queries)
    damping = dict.fromkeys(v, 0.1)
    u = curvature.solve(v, damping)
    for k in v:
        F_ = curvature.eigenvalues[k] / curvature.examples
        there = curvature.into({k: u[k]})[k] * (F_ + 0.1)
        torch.testing.assert_close(there, curvature.into({k: v[k]})[k], rtol=1e-9, atol=1e-12)
    plain = Curvature({})
    plain.add(gradients.all_rows(small, model, weights, small.train))
    u = plain.solve(v, damping)
    g = gradients.all_rows(small, model, weights, small.train)["0.weight"]
    expected = v["0.weight"] / ((g**2).mean(0) + 0.1)
    torch.testing.assert_close(u["0.weight"], expected, rtol=1e-9, atol=1e-12)


def test_factors_of_a_convolution_are_those_of_its_places() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1)).double()
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    factors = Factors(model)
    factors.add(lambda m: m(x).pow(2).sum() / 2)  # δ is the output
    S, A = factors.sums["0.weight"]
    padded, out = F.pad(x, (1, 1, 1, 1)), model(x).detach()
    a = [padded[b, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].flatten()
         for b, i, j in itertools.product(range(2), range(3), range(3))]  # fmt: skip
    d = [out[b, :, i, j] for b, i, j in itertools.product(range(2), range(3), range(3))]
    torch.testing.assert_close(A, sum(torch.outer(z, z) for z in a), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(S, sum(torch.outer(z, z) for z in d), rtol=1e-9, atol=1e-12)


def test_top_rows_are_removed(small: Problem) -> None:
    credit = torch.arange(12.0)[:, None] * torch.tensor([1.0, -1.0, 1.0, 1.0])
    assert removal.top(credit, 2).tolist() == [[11, 10], [0, 1], [11, 10], [11, 10]]
    training = gradients.train(small, 0, ours.CHECKPOINTS)
    found = removal.tail_patch(small, training, {"first": credit}, 2)
    assert found["drop"].keys() == {"first"}
    asked = {"first": credit, "none": torch.zeros(12, 4)}
    found = removal.brittleness(small, asked, [2, 11], queries=3, seeds=2)
    assert found["sizes"].keys() == {"2", "11"} and found["queries"] == 3
    assert found["sizes"]["2"]["rise"].keys() == {"first", "none"}
    assert found["sizes"]["2"]["flips"] == {"first": None, "none": None}  # it has no labels


def test_results_of_single_methods_are_added() -> None:
    known = {"k": 3, "rise": {"a": 1, "b": 2}}
    assert merged(known, {"k": 3, "rise": {"b": 5}}) == {"k": 3, "rise": {"a": 1, "b": 5}}
    assert merged(known, {}) == known
    assert merged(known, {"k": None, "new": None}) == known | {"new": None}


def test_a_problem_at_small_size(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    given = problem("digits-mlp-noisy", CPU, None, 0.05)
    args = Namespace(
        seconds=None, subsets=5, repeats=2, cache=tmp_path, together=5, runs=1, draws=5,
        methods="secant,ekfac_at_end,trak", no_rivals=True,
    )  # fmt: skip
    first, *_, result = measured(given, args)
    assert first["repeats"] == 2  # known before any credit is
    assert not result["failed"]
    names = {"inrun secant", "inrun secant, without the first tenth", "our EK-FAC, biases apart",
             "our TRAK, exact features"}  # fmt: skip
    assert result["methods"].keys() == names
    assert all(-1 <= m["lds"]["mean"] <= 1 for m in result["methods"].values())


def test_the_last_layer_alone_is_the_encoder() -> None:
    """From what is below it: the same logits and gradients, with padding and without data."""
    words = torch.tensor([[3, 4, 5, 0, 0], [6, 7, 3, 4, 5], [5, 0, 0, 0, 0]])
    base = encoder.small(8, 0, num_hidden_layers=2).double().eval()
    last = problems.LastLayer(base.model)
    hidden = problems.below_last(base, words)
    assert hidden.shape == (3, 5, 16) and not hidden[words == 0].any()
    own = [w for k, w in base.model.named_parameters() if "layer.1" in k or "pooler" in k]
    assert {id(w) for w in last.parameters()} > {id(w) for w in own}
    found = [[x, *torch.autograd.grad(x.square().sum(), own)] for x in (base(words), last(hidden))]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    given = problem("sst2-layer-noisy", CPU, None, 0.1)
    assert given.examples == 60 and len(given.queries[0]) == 1 and int(given.spoilt.sum())
    heads = [given.make(s).classifier.weight for s in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_libraries_get_problems_that_they_can_read(small: Problem) -> None:
    gpt = problem("byte-gpt", CPU, None, 0.1)
    assert rivals.of(gpt) == list(rivals.ANY_LOSS)
    assert {*rivals.of(replace(gpt, classifies=True))} > {*rivals.of(gpt)}
    assert rivals.of(small) == [rivals.kronfluence_ekfac]  # in chunks: a large model
    for given in (small, gpt):
        model, rows = given.make(0), tuple(x[:3] for x in given.train)
        weights = dict(model.named_parameters())
        torch.testing.assert_close(
            rivals.rows_loss(given, model)(weights, rows), given.loss(model, rows)
        )
        each = [rivals.one_row(given, model)(weights, tuple(x[i] for x in rows)) for i in range(3)]
        torch.testing.assert_close(torch.stack(each), given.losses(model, rows))


def test_a_model_of_transformers_is_for_bergson() -> None:
    pytest.importorskip("transformers", reason="needs the extra inrun[hf]")
    given, gpt = (problem(name, CPU, None, 0.1) for name in ("byte-llama", "byte-gpt"))
    assert all(torch.equal(a, b) for a, b in zip(given.train, gpt.train, strict=True))
    bergson = [m for many in rivals.TRANSFORMERS.values() for m in many]
    assert rivals.of(given) == [*rivals.ANY_LOSS, *bergson]
    model = given.make(0)
    (ids,) = given.train
    plain = model.model(input_ids=ids, labels=ids).loss  # its own mask and places
    torch.testing.assert_close(given.losses(model, (ids,)).mean(), plain)


def test_bergsons_scores_go_with_ours() -> None:
    pytest.importorskip("bergson", reason="another library")
    given = problem("byte-llama", CPU, None, 0.25)
    training = gradients.train(given, 0, ours.CHECKPOINTS)
    own = ours.ekfac_at_end(given, 0, training)["our EK-FAC, biases apart"].values.double()
    for method, least in ((rivals.bergson_ekfac, 0.8), (rivals.bergson_trackstar, 0.3)):
        for name, found in method(given, 0, training).items():
            assert float(measures.spearman(found.values, own).mean()) > least, name


def test_labels_are_drawn_from_what_the_model_predicts() -> None:
    """Their loss is on average the entropy of the prediction."""
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 4).expand(2, 2001, 4)
    entropy = torch.distributions.Categorical(logits=logits[:, 0]).entropy()
    tokens = torch.zeros(2, 2001, dtype=torch.long)
    found = rivals.drawn_losses(lambda _: logits, (tokens,))  # type: ignore[arg-type]
    assert (found - entropy).abs().max() < 0.1
    labels = rivals.drawn_losses(lambda _: logits[:1, 0], (tokens[:1], tokens[:1, 0]))  # type: ignore
    assert labels.shape == (1,)


def test_sums_over_visits_are_the_values_of_the_run(small: Problem) -> None:
    model, run, seconds = inside.watched(small, 0, ["secant"], inside.queries(small))
    found = inside.sums(small, run, "secant", seconds)["inrun secant"].values
    table = run.values("secant").sort_values("id")[["q0", "q1", "q2", "q3"]].to_numpy()
    torch.testing.assert_close(found, torch.from_numpy(table.copy()), rtol=1e-9, atol=1e-12)
    plain = gradients.train(small, 0)
    for k, w in model.named_parameters():  # fast: the same up to rounding
        torch.testing.assert_close(w.detach(), ours.end(plain)[k], rtol=1e-9, atol=1e-12)


def test_labels_flip_where_the_rows_that_made_them_are_gone(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "removal.json"
    small = ["digits-mlp", "--scale", "0.1", "--queries", "3", "--seeds", "1", "--no-rivals"]
    for method in ("graddot", "trak"):
        without([*small, "--methods", method, "--out", str(out)])
    found = json.loads(out.read_text())["problems"]["digits-mlp"]
    assert not found["failed"] and found["brittleness"]["sizes"].keys() == {"2", "5", "20"}
    for size in found["brittleness"]["sizes"].values():
        assert size["flips"].keys() == {"our GradDot", "our TRAK, exact features"}
        assert 0 <= size["random_flips"] <= 1
    given = problem("digits-mlp", CPU, None, 0.1)
    own = given.train[1][:, None] == given.queries[1][None]  # all rows of a query's own label
    k = int(own.sum(0).max())
    whole = removal.removed(given, torch.empty(len(own.T), 0, dtype=torch.long), 3, 1)
    gone = removal.removed(given, own.double().topk(k, dim=0).indices.T, 3, 1)
    right = (whole.labels == given.queries[1][:3]).double().mean()
    assert right > 0.5 and removal.flips(gone, whole) >= right  # nothing is left to say that label


def test_projections_are_of_the_scores_that_ask_gives(small: Problem) -> None:
    found = inside.ask(small, 0, gradients.train(small, 0))["inrun ask"].values
    for x, y in projection.pairs(small, 0).values():
        torch.testing.assert_close((x @ y.T).double() / 12, found, rtol=1e-5, atol=1e-9)
        assert projection.slope(x.new_tensor([[1.0], [3.0]]), x.new_tensor([[5.0], [6.0]])) == 0.5
        near = projection.projected(x, y, 1 << 15, 0)
        assert float((near - x @ y.T).norm() / (x @ y.T).norm()) < 0.1


def test_projections_are_measured_with_and_without_retraining(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "projected.json"
    for subsets in ("4", "0"):
        projection.main([
            "digits-mlp", "--scale", "0.05", "--subsets", subsets, "--repeats", "1",
            "--sizes", "64", "--out", str(out),
        ])  # fmt: skip
        found = json.loads(out.read_text())["problems"]["digits-mlp"]["found"]
        assert found.keys() == {"exact", "whole, 64", "half, 64"}
        assert all(("lds" in cell) == (subsets == "4") for cell in found.values())
        assert found["exact"]["same"] == pytest.approx(1) and found["half, 64"]["same"] < 1


def test_unknown_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no problem 'mnist': use digits-mlp"):
        problem("mnist", CPU, None)


def test_truth_keeps_the_outcomes_for_the_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--subsets", "3", "--repeats", "2", "--scale", "0.05", "--cache", str(tmp_path)]
    truth.main(["digits-mlp:1", "no-such-problem", *sizes])
    assert "no-such-problem left out" in capsys.readouterr().out
    given = problem("digits-mlp:1", CPU, None, 0.05)
    masks = retrain.halves(given.examples, 3)
    kept, _ = retrain.outcomes(given, masks, 2, tmp_path)
    again, _ = retrain.outcomes(given, masks, 2)
    assert len(list(tmp_path.iterdir())) == 2
    torch.testing.assert_close(kept, again)


def test_another_draw_has_other_rows_and_another_name() -> None:
    one, other = (problem(f"digits-mlp:{k}", CPU, None, 0.05) for k in (0, 1))
    assert other.name == "digits-mlp-draw1" and one.name == "digits-mlp"
    assert not torch.equal(one.train[0], other.train[0])
    assert not torch.equal(one.queries[0], other.queries[0])


def test_watching_is_timed_beside_the_plain_training(tmp_path: Path) -> None:
    out = tmp_path / "lds-cpu.json"
    out.write_text(json.dumps({"problems": {"byte-gpt": {"steps": 3}}}))
    before = clock.now
    try:
        cost.main(["byte-gpt", "--scale", "0.1", "--repeats", "1", "--out", str(out)])
    finally:
        clock.now = before
    found = json.loads(out.read_text())["problems"]["byte-gpt"]
    assert found["steps"] == 3 and min(found["watching"]["seconds"].values()) > 0
    assert list(found["watching"]["seconds"]) == [
        "plain",
        "secant, one target of 1 rows", "secant, one target of 4 rows", "secant, 4 targets",
        "influence, one target of 1 rows", "influence, one target of 4 rows",
        "influence, 4 targets",
    ]  # fmt: skip
