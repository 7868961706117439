"""The curvature is saved with the ledger, goes on from checkpoints, and is refused where wrong."""

import io
import json

import numpy as np
import pytest
import torch
from torch import nn

import inrun
from inrun.curvature import saved
from inrun.curvature.curvature import Sampling
from inrun.ledger import LedgerError


def mse(model, batch):
    return (model(batch) - 1).square().mean()


def trained(
    out=None, steps=10, state=None, optimizer=None, model=None, first=0, run=None, **options
):
    torch.manual_seed(0)
    x = torch.randn(12, 5, 3, dtype=torch.float64)
    if model is None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = run or inrun.watch(
        model, optimizer, validation=[x[0]], loss=mse, out=out, estimator="influence", **options
    )
    if state is not None:
        run.load_state_dict(state)
    for k in range(first, steps):
        with run.batch(range(5)):
            mse(model, x[k]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run, model, optimizer


def curvature_of(run):
    return run._steppers[0].scorer.maps.curvature


def test_saved_and_read_again(tmp_path):
    run, _, _ = trained(tmp_path / "run")
    run.close()
    found = saved.read(tmp_path / "run", inrun.open(tmp_path / "run").info["run"])
    own = curvature_of(run)
    assert found.step == 9 and found.layers.keys() == own.layers.keys()
    assert {k for x in found.layers.values() for k in x.place.names} == set(run.params)
    for name, layer in own.layers.items():
        assert found.layers[name].shapes == {k: run.params[k].shape for k in layer.place.names}
        v = [torch.randn(2, *x, dtype=torch.float64) for x in layer.shapes.values()]
        a, b = (x.directions(v, 0.3) for x in (found.layers[name], layer))
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert own.layers["0.weight"].U_S is not None  # eigenbases were there


@pytest.mark.parametrize("every", [1, 4])
def test_a_resumed_run_goes_on_where_it_was(monkeypatch, every):
    """Also between two observations, where directions stay."""
    if every > 1:
        monkeypatch.setattr(Sampling, "of", staticmethod(lambda *_: Sampling(3, 2, every)))
    whole, model, optimizer = trained(steps=9)
    whole.state_dict()
    trained(run=whole, model=model, optimizer=optimizer, first=9)
    half, model, optimizer = trained(steps=9)
    buffer = io.BytesIO()
    torch.save(half.state_dict(), buffer)
    half.close()
    buffer.seek(0)
    state = torch.load(buffer, weights_only=False)
    resumed, _, _ = trained(state=state, model=model, optimizer=optimizer, first=9)
    a, b = (r.history()["value"].to_numpy() for r in (whole, resumed))
    assert np.array_equal(a, b) and len(a) == 50
    whole.close()
    resumed.close()
    state.pop("curvature")
    again, _, _ = trained(steps=0)
    with pytest.raises(LedgerError, match="has no curvature"):
        again.load_state_dict(state)
    again.close()


def test_coverage_says_how_it_is_kept_and_its_size():
    run, _, _ = trained()
    found = run.coverage().set_index("parameter")
    assert dict(found["curvature"]) == {
        "0.weight": "two-sided", "0.bias": "with 0.weight",
        "2.weight": "two-sided", "2.bias": "with 2.weight",
    }  # fmt: skip
    for name, layer in curvature_of(run).layers.items():
        kept = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        assert found.loc[name, "curvature_bytes"] == sum(x.nbytes for x in kept)
    run.close()


def test_influence_is_not_audited(tmp_path):
    """It does not add up to a loss change, so nothing says how much of one it explains."""
    run, _, _ = trained(tmp_path, audit_every=1)
    run.close()
    for tables in (run, inrun.open(tmp_path)):
        steps = tables.steps()
        assert steps[["loss", "batch_share", "explained"]].isna().all(axis=None)
        assert steps["sum"].notna().all()
    assert np.isnan(run.tally.explained) and "explained" not in run.tally.line()
    assert inrun.open(tmp_path).summary()["audited"] == 0


def test_another_runs_curvature_is_refused(tmp_path):
    run, _, _ = trained(tmp_path)
    run.close()
    with pytest.raises(LedgerError, match="belongs to an earlier run"):
        saved.read(tmp_path, "f" * 32)
    with pytest.raises(LedgerError, match=r"has no curvature\.npz"):
        saved.read(tmp_path / "values", None)


def test_nothing_in_the_file_is_executed(tmp_path):
    """Objects, other sizes and cut files are refused."""
    run, _, _ = trained(tmp_path)
    run.close()
    file = tmp_path / saved.FILE
    good = dict(np.load(file))
    about = json.loads(good["about"].tobytes())
    about["layers"][0]["shape"] = [2, 2]
    wrong = np.frombuffer(json.dumps(about).encode(), np.uint8)
    cases = (
        good | {"0.spectrum": np.array([print], dtype=object)},
        good | {"0.spectrum": good["0.spectrum"][:1]},
        good | {"about": wrong},
        {k: v for k, v in good.items() if k != "0.tau"},
    )
    for bad in cases:
        np.savez(file, **bad)
        with pytest.raises(LedgerError, match="is damaged"):
            saved.read(tmp_path, None)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(LedgerError, match="is damaged"):
        saved.read(tmp_path, None)


def test_refused():
    model = nn.Linear(2, 2)
    two = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match="with step_together=False"):
        inrun.watch(
            model, two, validation=[x], loss=mse, estimator="influence", step_together=False
        )
    model.register_parameter("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the complex parameter c"):
        inrun.watch(model, optimizer, validation=[x], loss=mse, estimator="influence")
    for name in ("influence:", "influence:0", "influence:x", "secant:1", "influence:inf"):
        with pytest.raises(ValueError, match=r"is not known: .* colon"):
            inrun.watch(model, optimizer, validation=[x], loss=mse, estimator=name)
    run, _, _ = trained(steps=1)
    with pytest.raises(ValueError, match="check\\(\\) compares one step"):
        run.check()
    run.close()
