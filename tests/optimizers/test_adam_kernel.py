"""Adam's kernel against the rule whose formulas it computes, interpreted where there is no GPU."""

import json

import pytest
import torch

from helpers.triton_script import SHAPES, errors_of, prepare

pytest.importorskip("triton", reason="needs Triton")

GROUPS = [
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4},
    {"lr": torch.tensor(1e-3, dtype=torch.float64), "weight_decay": 0.0},
]
SHIFTS = {
    f"{name}-{kind}-{x}": (dtypes, kind, x)
    for name, dtypes in {
        "single": (torch.float32, torch.float32),
        "half-gradients": (torch.float32, torch.bfloat16),
        "half": (torch.bfloat16, torch.bfloat16),
    }.items()
    for kind, x in (("secant", 0.5), ("tangent", None), (None, 0.2113), ("secant", None), (None, 1))
}


def shifted(dtypes, kind, x, there=False):
    """The largest relative errors of weights and factors. ``there``: the kernel reads the steps so
    far by their addresses, as those of a fused optimizer."""
    from inrun import kernels
    from inrun.optimizers import rule_for
    from inrun.scoring.path import ParamStep

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).to(dtypes[0])) for s in SHAPES]
    groups = [{"params": params[i::3], **g} for i, g in enumerate(GROUPS)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    rule, moved, exact = rule_for(optimizer), [], []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            state["exp_avg_sq"].view(-1)[0] = 0.0  # never touched before
            state["exp_avg"].view(-1)[0] = 0.0
            g = torch.randn(p.shape).to(dtypes[1])
            g.view(-1)[0] = 0.0
            moved.append((p, g, state, group))
            wide = {k: v.double() if k != "step" else v for k, v in state.items()}
            exact.append(ParamStep.of(p.detach().double(), g.double(), rule, wide, group))
    step = rule.whole_model(
        [g for _, g, *_ in moved], [p.detach() for p, *_ in moved],
        [s for *_, s, _ in moved], [o for *_, o in moved],
    )  # fmt: skip
    if there and not torch.cuda.is_available():
        kernels.readable = lambda tensors: True
    before = [t.clone() for t in (*step.p, *step.g, *step.m, *step.v)]
    weights, factors = step.weights_and_factors(x, kind)
    errors = {"finite": float(step.bad.any())}
    same = all(
        torch.equal(a, b) for a, b in zip(before, (*step.p, *step.g, *step.m, *step.v), strict=True)
    )
    errors |= {"untouched": 0.0 if same else 1.0, "weights": 0.0, "factors": 0.0}
    if (weights is None) != (x is None) or (factors is None) != (kind is None):
        errors["untouched"] = 2.0
    entries = sampled(step)
    for i, e in enumerate(exact):
        ends = torch.stack([e.p, e.weights_at(0.0), e.weights_at(1.0)]).flatten(1)
        off = _error(entries[:, i], ends[:, places_of(e.p.numel())])
        errors["entries"] = max(errors.get("entries", 0.0), off)
        if weights is not None:
            errors["weights"] = max(errors["weights"], _error(weights[i], e.weights_at(x)))
        if factors is not None:
            own = e.map(kind)(torch.ones_like(e.g))
            errors["factors"] = max(errors["factors"], _error(factors[i], own))
    bad = [i in (1, 4) for i in range(len(step.g))]
    for g, value in ((step.g[1], float("nan")), (step.g[4], float("-inf"))):
        g.view(-1)[-1] = value
    again = step.again(list(step.g))
    again.weights_and_factors(x, kind)
    errors["told"] = float(again.bad.bool().tolist() != bad)
    return errors


def places_of(size):
    from inrun.scoring.samples import entries_of

    return torch.from_numpy(entries_of(size)).to(torch.get_default_device())


def sampled(step):
    from inrun.scoring.samples import SAMPLED, table

    sizes = tuple(p.numel() for p in step.p)
    return step.sampled(table(sizes, step.p[0].device), SAMPLED)


def _error(got, expected):
    got = got.double()
    scale = expected.abs().max()
    each = (got - expected).abs() / (expected.abs() + 1e-3 * scale + 1e-30)
    return float(each.nan_to_num(nan=1e9).max())


def main():
    prepare()
    found = {name: shifted(*case) for name, case in SHIFTS.items()}
    found["steps there"] = shifted((torch.float32, torch.float32), "secant", 0.5, there=True)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def errors():
    return errors_of(__file__)


@pytest.mark.parametrize("name", [*SHIFTS, "steps there"])
def test_weights_and_factors_are_those_of_the_rule(errors, name):
    found = errors[name]
    assert found["untouched"] == found["finite"] == found["told"] == 0.0
    # bfloat16 weights are rounded when they are written, and so is Adam's state
    assert found["weights"] < (
        1e-2 if name.startswith("half-") and "gradients" not in name else 1e-5
    )
    assert found["factors"] < 1e-4
    assert found["entries"] < (1e-2 if name.startswith("half-") else 1e-5)


if __name__ == "__main__":
    main()
