"""Parameters computed in one piece have the same maps and weights as each on its own."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from inrun.optimizers import rule_for
from inrun.scoring import packs as packs_module
from inrun.scoring.path import ParamStep, Path

SHAPES = [(4, 4), (8,), (5,), (), (2, 3, 4), (7,), (16,), (40, 30), (1,)]
OPTIMIZERS = {
    "sgd": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd without momentum": (optim.SGD, {}),
    "asgd": (optim.ASGD, {}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adamw": (optim.AdamW, {}),
    "adamw amsgrad": (optim.AdamW, {"amsgrad": True}),
    "adamw without a second memory": (optim.AdamW, {"betas": (0.9, 0.0)}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "adadelta": (optim.Adadelta, {}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adafactor": (optim.Adafactor, {}),
}


def moved(cls: type[optim.Optimizer], options: dict[str, object], steps: int) -> list[ParamStep]:
    """Two groups, one parameter that missed a step, so that its count differs, and one new."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in SHAPES]
    late = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    groups = [{"params": params[:5]}, {"params": [*params[5:], late], "lr": 3e-3}]
    optimizer = cls(groups, lr=1e-2, **options)  # type: ignore[call-arg]
    for step in range(steps + 1):
        for i, p in enumerate(params):
            p.grad = None if (step, i) == (1, 2) else torch.randn_like(p)
        late.grad = torch.randn_like(late) if step == steps else None
        if step < steps:
            optimizer.step()
    rule = rule_for(optimizer)
    return [
        ParamStep.of(p, p.grad, rule, optimizer.state.get(p, {}), group)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]


@pytest.mark.parametrize("kind", ["secant", "tangent", "sgd"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@torch.no_grad()
def test_parameters_computed_together_give_what_each_gives_alone(name, steps, kind, monkeypatch):
    every = moved(*OPTIMIZERS[name], steps)
    found = []
    for piece in (2**18, 1):
        monkeypatch.setitem(packs_module.PACK_SIZE, "cpu", piece)
        path = Path(every)
        maps = path.maps(kind, None if kind != "secant" else 0.5)
        with path.weights(0.5):
            weights = [m.p.data.clone() for m in every]
        vectors = [torch.ones_like(m.p) * 0.7 for m in every]
        found.append(([f(v) for f, v in zip(maps, vectors, strict=True)], weights, path))
    (u, w, joined), (u1, w1, single) = found
    assert len(single.packs) == len(every)
    if name != "adafactor":  # which looks at whole parameters
        assert len(joined.packs) < len(every)
    for a, b in (*zip(u, u1, strict=True), *zip(w, w1, strict=True)):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_packs_end_at_their_limit(monkeypatch):
    every = moved(optim.AdamW, {}, 2)
    monkeypatch.setitem(packs_module.PACK_SIZE, "cpu", 40)
    packs = Path(every).packs
    assert all(every[i] is m for r in packs for i, m in zip(r.places, r.members, strict=True))
    assert sorted(i for r in packs for i in r.places) == list(range(len(every)))
    assert all(len(r.members) == 1 or r.joined().p.numel() <= 40 for r in packs)
    assert all(len(r.members) == 1 for r in packs if r.members[0].p.numel() >= 20)  # large: alone
    assert any(len(r.members) > 1 for r in packs)
    for pack in packs:  # aligned: an odd one is the last of its pack
        assert all(m.p.numel() % 8 == 0 for m in pack.members[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zeros", ["none", "some", "empty"])
@torch.no_grad()
def test_weights_and_secant_in_one_pass(zeros, dtype):
    """``one_pass`` beside the formulas that it rearranges; untouched coordinates carry nothing."""
    torch.manual_seed(0)
    n = 0 if zeros == "empty" else 60
    p = torch.nn.Parameter(torch.randn(n, dtype=dtype))
    optimizer = optim.AdamW([p], lr=1e-2)
    untouched = torch.arange(n) % 3 == (0 if zeros == "some" else 3)
    for _ in range(3):
        p.grad = torch.randn_like(p).masked_fill(untouched, 0.0)
        optimizer.step()
    rule, group, state = rule_for(optimizer), optimizer.param_groups[0], optimizer.state[p]
    given = [p.grad, p.data, state["exp_avg"], state["exp_avg_sq"]]
    before = [x.clone() for x in given]
    K, w = rule.one_pass["secant"](p.grad, p.data, state, group, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(K, rule.factor(p.grad, p.data, state, group), **close)
    torch.testing.assert_close(
        w, ParamStep.of(p, p.grad, rule, state, group).weights_at(0.3), **close
    )
    assert bool((K[untouched] == 0).all())


@pytest.mark.parametrize("kind", ["secant", "tangent", "sgd"])
@torch.no_grad()
def test_nothing_is_read_back_from_the_device(kind):
    """Step counts on the device (fused AdamW): on the meta device every reading raises."""
    option = optim.AdamW([torch.nn.Parameter(torch.zeros(8))], fused=True)
    group = option.param_groups[0]
    there = [
        ParamStep.of(
            torch.nn.Parameter(torch.zeros(8, 8, device="meta")),
            torch.zeros(8, 8, device="meta"),
            rule_for(option),
            {
                "step": torch.zeros((), device="meta"),
                "exp_avg": torch.zeros(8, 8, device="meta"),
                "exp_avg_sq": torch.zeros(8, 8, device="meta"),
            },
            group,
        )
        for _ in range(3)
    ]
    path = Path(there)
    maps = path.maps(kind, 0.5 if kind == "secant" else None)
    with path.weights(0.5):
        assert len(maps) == len(path.packs) == 3


@torch.no_grad()
def test_weights_of_packs_that_alternate_are_in_the_order_of_the_parameters(monkeypatch):
    """Two kinds in turn: the packs' members are an involution of the parameters."""
    monkeypatch.setitem(packs_module.PACK_SIZE, "cpu", 64)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s)) for s in (8, 24, 16, 8)]
    groups = [{"params": [params[0], params[2]]}, {"params": [params[1], params[3]], "lr": 1e-2}]
    optimizer = optim.AdamW(groups, lr=1e-3)
    rule, options = rule_for(optimizer), optimizer.param_groups
    every = [
        ParamStep.of(p, torch.randn_like(p), rule, {}, options[i % 2]) for i, p in enumerate(params)
    ]
    path = Path(every)
    assert [pack.places for pack in path.packs] == [[0, 2], [1, 3]]
    for w, m in zip(path.point(0.5), every, strict=True):
        torch.testing.assert_close(w, m.weights_at(0.5))
