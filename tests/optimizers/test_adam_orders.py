"""The kernel for sampled orders against the rule's update, interpreted where there is no GPU."""

import json

import pytest
import torch

from helpers.triton_script import errors_of, prepare

pytest.importorskip("triton", reason="needs Triton")

CASES = {
    f"{n}-{C}-{Q}-{kind}": (n, C, Q, kind)
    for n, C, Q, kind in [
        (8, 1, 1, "plain"), (75, 3, 1, "plain"), (600, 5, 3, "scaled"), (257, 4, 2, "clipped"),
        (130, 6, 1, "first step"),
    ]
}  # fmt: skip


def compared(N, C, Q, kind):
    """The largest error of values by the kernel, beside those of the torch code."""
    from inrun.optimizers import rule_for
    from inrun.scoring.clipping import Clipping
    from inrun.scoring.coalitions import Game
    from inrun.scoring.joining import Orders, block
    from inrun.scoring.moved import ParamStep

    rng = torch.Generator(torch.get_default_device()).manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=rng)  # noqa: E731
    p = torch.nn.Parameter(draw(N))
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for _ in range(0 if kind == "first step" else 2):
        p.grad = draw(N)
        optimizer.step()
    rows, v = draw(C, N), draw(Q, N)
    gram = rows @ rows.T if kind == "clipped" else None
    clipping = {"scaled": Clipping(0.25, 0.25), "clipped": Clipping(0.5, norm=3.0)}
    game = Game(None, [], {}, clipping.get(kind, Clipping(1.0)), [])
    g = 0.5 * rows.sum(0)
    rule, group = rule_for(optimizer), optimizer.param_groups[0]
    orders = Orders(C, 3, rng)
    drawn = orders.draw(2 + -(-N // block(rows.device)), rows.device)
    found = []
    for wide in (False, True):
        x = (lambda t: t.double()) if wide else (lambda t: t)
        state = {k: t if k == "step" else x(t) for k, t in optimizer.state[p].items()}
        step = ParamStep.of(x(p.detach()), x(g), rule, state, group)
        own = x(rows), x(v), orders, None if gram is None else x(gram), drawn, 2
        found.append(game._by_kernel(step, *own))
        if wide:  # too wide for the kernel
            assert found.pop() is None
            found.append(game._of_rows(step, *own))
    values, expected = found
    return float((values - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def errors():
    return errors_of(__file__)


@pytest.mark.parametrize("case", CASES)
def test_gains_are_those_of_the_rule(case, errors):
    assert errors[case] < 2e-5


if __name__ == "__main__":
    prepare()
    print(json.dumps({name: compared(*case) for name, case in CASES.items()}))
