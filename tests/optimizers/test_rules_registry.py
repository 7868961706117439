"""Adding a rule, inheriting one, and being told why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import inrun
from inrun.optimizers import base, decoupled_decay, refuse_optimizer, register_optimizer, rule_for


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTERED", dict(base._REGISTERED))
    monkeypatch.setattr(base, "_REFUSED", dict(base._REFUSED))


class Lion(optim.Optimizer):
    """w ← (1 − lr·wd)w − lr·sign(β₁m + (1−β₁)g), m ← β₂m + (1−β₂)g."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * m + (1 - beta1) * p.grad))
                m.lerp_(p.grad, 1 - beta2)


def lion(g: Tensor, w: Tensor, s: base.State, o: base.Options) -> Tensor:
    beta1, _ = o["betas"]
    return o["lr"] * torch.sign(beta1 * s.get("m", 0.0) + (1 - beta1) * g)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 4))


def test_lion_in_a_few_lines() -> None:
    register_optimizer(Lion, decay=decoupled_decay)(lion)
    w = parameter()
    optimizer = Lion([w])
    rule = rule_for(optimizer)
    for _ in range(4):
        w.grad = torch.randn(3, 4)
        w.grad[0, 0] = 0
        args = (w.grad, w.detach().clone(), optimizer.state[w], optimizer.param_groups[0])
        v = torch.randn(3, 4)
        change = rule.update(*args) - rule.update(torch.zeros_like(w), *args[1:])
        torch.testing.assert_close(rule.secant(*args)(v) * w.grad, v * change)  # it adds up
        assert (rule.tangent(*args)(v) == 0).all()  # while a sign has no derivative
        expected = rule.decay(args[3]) * args[1] - rule.update(*args)
        optimizer.step()
        torch.testing.assert_close(w.detach(), expected)


def test_subclasses_inherit() -> None:
    class Mine(optim.AdamW):
        pass

    assert rule_for(Mine([parameter()])) is rule_for(optim.AdamW([parameter()]))
    register_optimizer(Mine)(lion)
    assert rule_for(Mine([parameter()])).update is lion
    assert rule_for(optim.AdamW([parameter()])).update is not lion


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_a_factor_may_be_one_number(form: Any) -> None:
    """Of a rule of one's own; it is that of every coordinate."""

    class Mine(optim.SGD):
        pass

    def factor(g: Tensor, w: Tensor, s: Any, o: Any) -> Tensor:
        return torch.tensor(o["lr"])

    found = []
    for mine in (False, True):
        if mine:
            register_optimizer(Mine, factor=factor)(lambda g, w, s, o: o["lr"] * g)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = Mine(model.parameters(), lr=0.1)
        data = torch.randn(5, 3)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).square().mean()

        run = inrun.watch(model, optimizer, validation=[data], loss=loss, form=form)
        with run.batch(range(5)):
            loss(model, data).backward()
        optimizer.step()
        found.append(torch.tensor(run.values()["value"].to_numpy()))
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found)


def test_unknown_optimizer_says_what_to_do() -> None:
    with pytest.raises(TypeError) as error:
        rule_for(Lion([parameter()]))
    message = str(error.value)
    assert "no rule for the optimizer test_rules_registry.Lion" in message
    assert "@inrun.register_optimizer(Lion)" in message
    assert "AdamW" in message


@pytest.mark.parametrize(
    ("cls", "advice"),
    [
        (optim.LBFGS, "AdamW, SGD or Muon"),
        (optim.Rprop, "Use SGD or RMSprop"),
        (optim.SparseAdam, "sparse=False"),
    ],
)
def test_refusals_give_reason_and_remedy(cls: type[optim.Optimizer], advice: str) -> None:
    with pytest.raises(TypeError, match=f"cannot watch {cls.__name__}: .*{advice}"):
        rule_for(cls([parameter()]))


def test_a_refused_subclass_of_a_known_optimizer() -> None:
    class Odd(optim.SGD):
        pass

    refuse_optimizer(Odd, "it is odd. Use SGD.")
    with pytest.raises(TypeError, match="cannot watch Odd: it is odd"):
        rule_for(Odd([parameter()]))
    assert rule_for(optim.SGD([parameter()]))


def test_every_optimizer_of_torch_is_decided() -> None:
    for name in dir(optim):
        cls = getattr(optim, name)
        if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and name != "Optimizer":
            assert cls in base._REGISTERED or cls in base._REFUSED, name


def test_another_muon_is_told_from_torchs() -> None:
    """timm has an optimizer of the same name: the message names both and says what to do."""
    Other = type("Muon", (optim.Optimizer,), {"__module__": "timm.optim.muon"})
    with pytest.raises(TypeError) as error:
        rule_for(Other([parameter()], {"lr": 1e-3}))
    message = str(error.value)
    assert "no rule for the optimizer timm.optim.muon.Muon" in message
    assert "torch.optim.Muon is another class" in message
    assert "torch.optim.AdamW" in message and "@inrun.register_optimizer(Muon)" in message
