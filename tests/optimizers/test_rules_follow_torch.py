"""decay·w − update is the step that `torch.optim` takes, for every option and implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from helpers.optimizer_zoo import MUON, OPTIONS, Case
from inrun.optimizers import rule_for

FUSED = {optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}
DIFFERENTIABLE = {case.cls for case in OPTIONS} - {optim.Adafactor}


def implementations(case: Case) -> list[Case]:
    choices: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
    if case.cls in FUSED:
        choices.append({"fused": True})
    return [Case(case.cls, {**case.options, **choice}) for choice in choices]


def largest_error(case: Case, **kwargs: Any) -> float:
    """Over all steps and parameters: the error of the predicted change, relative to the change."""
    worst = 0.0
    for optimizer, moment in case.moments(**kwargs):
        rule = rule_for(optimizer)
        predicted = rule.decay(moment.o) * moment.w - rule.update(*moment.args)
        change = (moment.after - moment.w).abs().max().item()
        worst = max(worst, (predicted - moment.after).abs().max().item() / change)
    return worst


@pytest.mark.parametrize("case", [c for x in OPTIONS for c in implementations(x)], ids=str)
def test_the_rule_follows_torch_with_every_option(case: Case) -> None:
    assert largest_error(case) < 1e-12


@pytest.mark.parametrize("cls", sorted(DIFFERENTIABLE, key=str), ids=lambda c: c.__name__)
def test_the_rule_follows_differentiable_optimizers(cls: type[optim.Optimizer]) -> None:
    # Adam and NAdam then do their scalar arithmetic in float32, and so does the rule
    assert largest_error(Case(cls, {"differentiable": True, "foreach": False})) < 1e-7


@pytest.mark.parametrize("cls", sorted({c.cls for c in OPTIONS}, key=str), ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("lr", "tolerance"),
    [
        (torch.tensor(0.01, dtype=torch.float64), 1e-12),
        (torch.tensor([0.01], dtype=torch.float64), 1e-12),
        (torch.tensor(0.01), 1e-6),
    ],
    ids=["float64", "one-element", "float32"],
)
def test_the_rule_follows_a_tensor_learning_rate(
    cls: type[optim.Optimizer], lr: torch.Tensor, tolerance: float
) -> None:
    assert largest_error(Case(cls, {"lr": lr, "foreach": False})) < tolerance


@pytest.mark.parametrize("case", [*OPTIONS, *MUON], ids=str)
def test_the_rule_follows_torch_in_float32(case: Case) -> None:
    assert largest_error(case, dtype=torch.float32) < 2e-4


def test_the_rule_follows_tensor_betas() -> None:
    betas = (torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.99, dtype=torch.float64))
    assert largest_error(Case(optim.Adam, {"betas": betas, "foreach": False})) < 1e-12


@pytest.mark.parametrize("case", MUON, ids=str)
def test_the_rule_of_muon_follows_torch(case: Case) -> None:
    assert largest_error(case) < 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (16, 48), (48, 16), (64, 64)])
def test_muon_matches_the_bits(shape: tuple[int, int], dtype: torch.dtype, nesterov: bool) -> None:
    w = torch.zeros(shape, dtype=dtype)
    optimizer = optim.Muon([w], lr=0.5, nesterov=nesterov, weight_decay=0)
    rng = torch.Generator().manual_seed(1)
    for _ in range(3):
        w.zero_()  # then the step is the whole of the weights
        w.grad = torch.randn(shape, generator=rng).to(dtype)
        state = {k: v.clone() for k, v in optimizer.state[w].items()}
        update = rule_for(optimizer).update(w.grad, w, state, optimizer.param_groups[0])
        optimizer.step()
        if dtype is torch.bfloat16:  # there `add_(..., alpha=lr)` rounds lr to bfloat16 as well
            torch.testing.assert_close(w, -update, rtol=2**-7, atol=0)
        else:
            assert torch.equal(w, -update)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "options",
    [
        {"capturable": True, "foreach": False},
        {"capturable": True, "foreach": True},
        {"capturable": True, "foreach": True, "lr": torch.tensor(0.01)},
        {"fused": True},
        {"fused": True, "capturable": True},
        {"fused": True, "lr": torch.tensor(0.01)},
        {"foreach": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", sorted({c.cls for c in OPTIONS}, key=str), ids=lambda c: c.__name__)
def test_on_a_device_without_synchronising(
    cls: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    if options.get("fused") and cls not in FUSED - {optim.Adagrad}:
        pytest.skip("no fused implementation")  # Adagrad's came to CUDA late
    if "capturable" in options and cls in (optim.SGD, optim.Adagrad, optim.Adafactor):
        pytest.skip("no capturable option")
    if isinstance(options.get("lr"), torch.Tensor):
        options = {**options, "lr": options["lr"].cuda()}
    case = Case(cls, options)
    in_tensor = options.get("capturable") or isinstance(options.get("lr"), torch.Tensor)
    # in_tensor: float32 scalars; ASGD scales the weights by 1 − λη in float32, a whole ulp of w
    tolerance = (1e-4 if cls is optim.ASGD else 1e-6) if in_tensor else 1e-12
    assert largest_error(case, device="cuda") < tolerance
    for optimizer, moment in case.moments(device="cuda"):
        rule = rule_for(optimizer)
        v = torch.ones_like(moment.w)
        torch.cuda.set_sync_debug_mode("error")
        try:
            rule.update(*moment.args)
            rule.decay(moment.o)
            rule.secant(*moment.args)(v)
            rule.tangent(*moment.args)(v)
        finally:
            torch.cuda.set_sync_debug_mode("default")
