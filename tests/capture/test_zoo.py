"""Per-example gradients and values of every model of the zoo against the slow reference."""

import pytest
import torch

import inrun
from helpers.captures import captured, close, gradients_of, reference_rows, trainable
from helpers.zoo import ZOO
from inrun.exact import reference
from inrun.gradients.nodes import directions
from inrun.scoring import sampling
from inrun.scoring.contraction import Direction, contract
from inrun.tensors.derivative import VMAP_PAYS

POINTS_OF = {"secant": (0.5,), "shapley": (0.5,), "tangent": (None,), "sgd": (None,)}


@pytest.mark.parametrize("fast", [False, True], ids=["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise", "auto"])
@pytest.mark.parametrize("name", ZOO)
def test_per_example_gradients(name, form, fast):
    problem = ZOO[name]()
    expected = reference_rows(problem)
    _, micro = captured(problem, form=form, fast=fast)
    u = {k: torch.randn(2, *g[0].shape, dtype=g.dtype) for k, g in expected.items()}
    G = {k: g.sum(0) for k, g in expected.items()}
    found, _ = contract({k: Direction(x) for k, x in u.items()}, G, [micro])
    sums = sum(u[k].flatten(1) @ expected[k].flatten(1).T for k in u)
    assert close(found, sums, problem.tolerance), "before anyone asks for records"
    rows = gradients_of(micro)
    assert rows.keys() == expected.keys(), "every trainable parameter is covered"
    for k, g in expected.items():
        assert close(rows[k], g, problem.tolerance), k
    for k, p in trainable(problem.model).items():
        assert close(p.grad, expected[k].sum(0), 1e-9), k

    for Q in (1, VMAP_PAYS):
        u = {
            k: torch.randn(Q, *p.shape, dtype=p.dtype) for k, p in trainable(problem.model).items()
        }
        dots = sum(
            record.dots(directions(node, u)) for node, rs in micro.records.items() for record in rs
        )
        sums = sum(u[k].flatten(1) @ expected[k].flatten(1).T for k in u)
        assert close(dots, sums, problem.tolerance)


@pytest.mark.parametrize("name", ZOO)
def test_values(name, monkeypatch):
    """One real step after two others: secant+midpoint, Shapley values of the update, tangent and
    SGD values of every example."""
    for limit in ("EARLY", "ENOUGH"):  # sample until it is cheaper to take all
        monkeypatch.setattr(sampling, limit, 0.0)
    problem = ZOO[name]()
    model = problem.model
    params = list(trainable(model).values())
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
    other = ZOO[name]().batch  # another draw of the same kind

    def val_loss(m, batch):
        return problem.loss(problem.forward(m, batch), batch)

    run = inrun.watch(
        model,
        optimizer,
        validation=[other],
        loss=val_loss,
        estimator=["secant", "shapley", "tangent", "sgd", "secant+gauss2"],
        batch_dim=problem.batch_dim,
        audit_every=1,
    )
    for step in range(3):
        rows = list(reference_rows(problem).values()) if step == 2 else []
        with run.batch(range(problem.B)):
            problem.train_loss().backward()
        if step == 2:  # after the forward pass, which moved BatchNorm's statistics
            model.eval()
            expected = {
                kind: reference.values(
                    model, optimizer, rows, lambda m: val_loss(m, other), kind, points
                )
                for kind, points in POINTS_OF.items()
            }
            model.train()
        optimizer.step()
        optimizer.zero_grad()
    for kind, value in expected.items():
        got = run.history(kind).query("step == 2")["value"].to_numpy()
        assert close(torch.tensor(got), value, 1e-5 if kind == "tangent" else 1e-9), kind
    assert (run.coverage().query("status != 'frozen'")["status"] == "scored").all()
    last = run.steps("secant+gauss2").iloc[-1]
    assert abs(last["residual"]) <= 0.01 * run.history().query("step == 2")["value"].abs().sum()


@pytest.mark.parametrize("name", ZOO)
def test_a_batch_of_one_is_scored(name):
    """The last batch of an epoch: sizes of 1 are everywhere."""
    problem = ZOO[name]()
    dim, problem.B = problem.batch_dim, 1
    if isinstance(problem.batch, dict):
        problem.batch = {k: v[:1] for k, v in problem.batch.items()}
    else:
        problem.batch = tuple(x.narrow(dim if x.ndim > dim else 0, 0, 1) for x in problem.batch)
    expected = reference_rows(problem)
    for form in ("ghost", "materialise"):
        _, micro = captured(problem, form=form)
        rows = gradients_of(micro)
        assert rows.keys() == expected.keys()
        for k, g in rows.items():
            assert close(g, expected[k], 1e-9), k
