"""Small parameters side by side in packs: the same numbers as one by one."""

import pytest
import torch
from torch.optim import AdamW

from inrun.capture.micro_batch import MicroBatch
from inrun.gradients import Dense
from inrun.gradients.nodes import Node
from inrun.optimizers import rule_for
from inrun.optimizers.base import Part
from inrun.scoring import packs as packs_module
from inrun.scoring.contraction import add_gradient, contract, directions_through
from inrun.scoring.moved import Moved
from inrun.scoring.path import Path
from inrun.scoring.taken import _packed, _Scattered, predict
from inrun.scoring.uses import fill_packs

SHAPES = [(2, 4), (8,), (0,), (4, 2), (3,), (40, 5), (8, 2), (8,)]


def step_of_adam(monkeypatch):
    """After some steps: two groups, a large parameter, an empty one, one that is transposed."""
    monkeypatch.setitem(packs_module.PACK_SIZE, "cpu", 64)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(*s)) for s in SHAPES]
    params.append(torch.nn.Parameter(torch.randn(4, 2).t()))
    optimizer = AdamW([{"params": params[:5]}, {"params": params[5:], "lr": 0.1}])
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    moved = Moved.of([(optimizer, rule_for(optimizer))])
    return params, optimizer, moved, Path(moved)


def contracted(path, params, G, names, Q=1):
    maps = dict(zip(map(str, range(len(params))), path.maps("secant", 0.5), strict=True))
    torch.manual_seed(1)
    v = {k: torch.randn(Q, *params[int(k)].shape) for k in maps}
    rows = {k: torch.randn(2, *params[int(k)].shape) for k in maps}
    micro = MicroBatch(2)
    for k in names:
        micro.add(Node.parameter(k, params[int(k)]), Dense(rows[k]))
    u = directions_through({k: maps[k] for k in names}, {k: v[k] for k in names}, None)
    own = {k: maps[k].K * v[k] for k in names}
    wanted = sum(own[k].flatten(1) @ rows[k].flatten(1).T for k in names)
    sums = sum((own[k] * G[k]).flatten(1).sum(1) for k in names)
    found, _ = contract(u, {k: G[k] for k in names}, [micro])
    packs = fill_packs(u)
    along = sum(pack.along(G) for pack in packs)
    packed = [k for pack in packs for k in pack.names]
    expected = torch.zeros(Q)
    add_gradient(expected, {k: d for k, d in u.items() if k not in packed}, G)
    return (found, expected + along), (wanted, sums), maps, packs


@pytest.mark.parametrize("case", ["all", "one is left out", "clipped", "two targets"])
@torch.no_grad()
def test_directions_of_packs(case, monkeypatch):
    params, _, _, path = step_of_adam(monkeypatch)
    G = {str(i): p.grad for i, p in enumerate(params)}
    if case == "clipped":
        G = {k: 2 * g for k, g in G.items()}
    names = list(G)[1:] if case == "one is left out" else list(G)
    found, wanted, maps, packs = contracted(
        path, params, G, names, 2 if case == "two targets" else 1
    )
    assert sum(type(f) is Part for f in maps.values()) > 3 and type(maps["5"]) is not Part
    for x, y in zip(found, wanted, strict=True):
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-12)
    assert len(packs) == {"two targets": 0, "one is left out": 1}.get(case, 2)


@torch.no_grad()
def test_the_prediction_reads_packs_as_it_reads_parameters(monkeypatch):
    params, optimizer, moved, path = step_of_adam(monkeypatch)
    kinds = _packed(moved)
    assert len(kinds) == 2 and len(path.packs) >= 3
    for kind in kinds:
        found, wanted = kind.read(path), _Scattered(kind.members).read()
        assert found.keys() == wanted.keys() and len(found) == 4
        assert all(torch.equal(found[k], wanted[k]) for k in found)
    prediction = predict(moved, path, of_sample=True)
    optimizer.step()
    assert not bool(prediction.off())
    params[6][0] += 1e-2
    assert bool(prediction.off())
