"""An operation that is run a second time writes to nothing, and gives what the first run gave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.errors import CaptureError
from inrun.gradients.again import run_again


def statistics():
    return torch.zeros(3), torch.ones(3)


@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("name", ["F.batch_norm", "torch.batch_norm", "F.instance_norm"])
def test_running_statistics_are_left_alone(name, keywords):
    x, (mean, var) = torch.randn(4, 3, 5), statistics()
    if name == "F.batch_norm":
        func, args = F.batch_norm, (x, mean, var, None, None, True)
    elif name == "torch.batch_norm":
        func, args = torch.batch_norm, (x, None, None, mean, var, True, 0.1, 1e-5, False)
    else:
        func, args = F.instance_norm, (x, mean, var, None, None, True)
    kwargs = {}
    if keywords and name != "torch.batch_norm":
        flag = "training" if func is F.batch_norm else "use_input_stats"
        args, kwargs = (x,), {"running_mean": mean, "running_var": var, flag: True}
    again = run_again(func, args, kwargs)
    assert torch.equal(mean, statistics()[0]) and torch.equal(var, statistics()[1])
    assert torch.equal(again, func(*args, **kwargs))
    assert not torch.equal(mean, statistics()[0]), "the operation itself does write"


def test_running_statistics_that_are_used_are_used():
    x, mean, var = torch.randn(4, 3), torch.randn(3), torch.rand(3) + 1
    args = (x, mean, var, None, None, False)
    assert torch.equal(run_again(F.batch_norm, args, {}), F.batch_norm(*args))


def test_a_table_with_a_largest_norm_and_targets_of_writing_are_left_alone():
    table, ids = torch.full((3, 4), 10.0), torch.tensor([1])
    found = run_again(F.embedding, (ids, table), {"max_norm": 1.0})
    assert torch.equal(found, table[ids]) and (table == 10).all()
    target = torch.zeros(3)
    assert (run_again(torch.Tensor.copy_, (target, torch.ones(3)), {}) == 1).all()
    assert (target == 0).all()


def test_what_writes_unasked_is_refused():
    def writes(x, y):
        y.add_(1)
        return x * y

    with pytest.raises(CaptureError, match="'writes' of the forward pass writes to one of its arg"):
        run_again(writes, (torch.ones(2), torch.ones(2)), {})


class Normed(nn.Module):
    """BatchNorm of a table that has no example in it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 5))
        self.norm, self.query = nn.BatchNorm1d(5), nn.Linear(5, 5)

    def forward(self, x):
        return self.query(x) @ self.norm(self.table).T


class Padded(Normed):
    """... and of its rows among constant ones."""

    def forward(self, x):
        return self.query(x) * self.norm(torch.cat([self.table, torch.ones(2, 5)])).mean()


class Cached(nn.Module):
    """A weight that is made in each forward pass and kept in a buffer."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.randn(5, 5))
        self.register_buffer("made", torch.zeros(5, 5))

    def forward(self, x):
        weight = torch.empty_like(self.made).copy_(self.raw / self.raw.norm())
        self.made.copy_(weight.detach())
        return x @ weight


@pytest.mark.parametrize("Q", [1, 3])
@pytest.mark.parametrize("kind", [Normed, Padded, Cached])
def test_state_of_parameters_that_meet_no_example(kind, Q):
    def trained(watched):
        torch.manual_seed(0)
        model, x = kind(), torch.randn(30, 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        targets = {f"t{q}": [x[10 + 3 * q : 13 + 3 * q]] for q in range(Q)}

        def loss(model, x):
            return model(x).pow(2).mean()

        run = inrun.watch(model, optimizer, targets=targets, loss=loss) if watched else None
        for t in range(3):
            if run is None:
                loss(model, x[:8] + t).backward()
            else:
                with run.batch(range(8)):
                    loss(model, x[:8] + t).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), run

    (plain, _), (watched, run) = trained(False), trained(True)
    assert len(run.history()) == 24
    for name, x in plain.items():
        assert torch.equal(x, watched[name]), name
