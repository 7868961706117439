"""``run.check()`` steps copies of the optimizer, also where others have put a ``step`` into it."""

import torch
import torch.nn.functional as F
from torch import nn

import inrun

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(2))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(scheduled, checked):
    """The state after four steps, and the check of the third."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if scheduled:  # replaces optimizer.step by a function that steps this very optimizer
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    check = None
    with inrun.watch(model, optimizer, validation=[(X[10:], Y[10:])], loss=loss) as run:
        for step in range(4):
            if checked and step == 2:
                check = run.check()
            with run.batch(range(4)):
                loss(model, (X[:4], Y[:4])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.steps()["void"].isna().all()
    moments = [t for s in optimizer.state.values() for t in s.values()]
    return [*model.parameters(), *moments], check


def test_a_scheduler_does_not_matter():
    plain, _ = trained(scheduled=False, checked=False)
    state, check = trained(scheduled=True, checked=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))
    _, alone = trained(scheduled=False, checked=True)
    assert check.table.equals(alone.table)
