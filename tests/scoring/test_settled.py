"""What is kept from step to step gives the values of a run that makes everything again.

The same training twice: as it is, and with nothing kept. Between steps one thing changes that the
kept parts depend on. Values, weights and reasons for void steps must be equal.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.scoring.moved import Moved
from inrun.validation.reach import Reached

CHANGED_AT = 6  # by then nothing is copied or compared completely any more
STEPS = 11


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.last, self.extra = nn.Linear(8, 3), nn.Linear(5, 3)
        self.scale, self.with_extra, self.options = 1.0, False, {"power": [1.0]}

    def forward(self, x):
        out = self.last(F.softplus(self.norm(self.first(x)))) * self.scale
        out = out * self.options["power"][0]
        return out + self.extra(x) if self.with_extra else out


class Loop:
    """A training loop whose parts the changes replace."""

    def __init__(self, make, **options):
        torch.manual_seed(0)
        self.model = Net().double()
        own = [p for k, p in self.model.named_parameters() if not k.startswith("extra")]
        self.optimizer = make([{"params": own[:3]}, {"params": own[3:], "weight_decay": 0.1}])
        self.weight, self.between, self.batches, self.bound = 1.0, None, 1, None
        self.X, self.Y = torch.randn(8, 5).double(), torch.arange(8) % 3
        validation = [(torch.randn(4, 5).double(), torch.arange(4) % 3)]
        self.run = inrun.watch(
            self.model, self.optimizer, validation=validation, loss=self.loss, audit_every=0,
            **options,
        )  # fmt: skip

    def loss(self, model, batch):
        return self.weight * F.cross_entropy(model(batch[0]), batch[1])

    def step(self):
        size = 8 // self.batches
        for i in range(self.batches):
            rows = torch.arange(size * i, size * (i + 1))
            with self.run.batch(rows):
                loss = F.cross_entropy(self.model(self.X[rows]), self.Y[rows]) / self.batches
                loss.backward()
        if self.bound is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.bound)
        if self.between is not None:
            self.between()
        self.optimizer.step()
        self.optimizer.zero_grad()


def learning_rate(loop):
    for i, group in enumerate(loop.optimizer.param_groups):
        group["lr"] *= 3.0 + i


def learning_rate_in_every_step(loop):
    loop.between = lambda: learning_rate_falls(loop.optimizer)


def learning_rate_falls(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def other_options(loop):
    loop.optimizer.param_groups[0]["weight_decay"] = 0.3
    loop.optimizer.param_groups[1]["maximize"] = True


def add_param_group(loop):
    loop.model.with_extra = True
    loop.optimizer.add_param_group({"params": list(loop.model.extra.parameters()), "lr": 0.03})


def between_groups(loop):
    a, b = loop.optimizer.param_groups
    a["params"].append(b["params"].pop(0))


def load_state_dict(loop):
    state = copy.deepcopy(loop.optimizer.state_dict())
    for own in state["state"].values():
        for k, x in own.items():
            own[k] = x * 2 + 1 if k == "step" else x * 1.5
    loop.optimizer.load_state_dict(state)


def state_cleared(loop):
    loop.optimizer.state.clear()


def state_in_place(loop):
    """The count of one parameter, so that its group has no common one any more."""
    p = loop.optimizer.param_groups[0]["params"][1]
    for k, x in loop.optimizer.state[p].items():
        x.mul_(2.0).add_(3.0) if k == "step" else x.mul_(0.5)


def state_moved(loop):
    for own in loop.optimizer.state.values():
        for x in own.values():
            x.data = x.data.clone() * (1.0 if x.ndim == 0 else 1.3)


def gone_and_back(loop):
    """A parameter without a gradient in every second step."""
    own, zero_grad = loop.model.first.bias, loop.optimizer.zero_grad

    def after():
        zero_grad()
        own.requires_grad_(not own.requires_grad)

    loop.optimizer.zero_grad = after


def frozen(loop):
    loop.model.first.requires_grad_(False)


def weights_moved(loop):
    for p in loop.model.parameters():
        p.data = p.data.clone() * 1.1


def less_precise(loop):
    loop.model.float()
    loop.X = loop.X.float()
    state = loop.optimizer.state
    for p in state:
        state[p] = {k: x.float() for k, x in state[p].items()}
    batches = loop.run._validator.targets[0].source
    batches[0] = (batches[0][0].float(), batches[0][1])


def replaced_layer(loop):
    old, new = loop.model.last, nn.Linear(8, 3).double()
    with torch.no_grad():
        new.weight.copy_(old.weight * 0.5)
        new.bias.fill_(0.1)
    loop.model.last = new
    group = loop.optimizer.param_groups[-1]
    group["params"] = [p for p in group["params"] if p is not old.weight and p is not old.bias]
    group["params"] += new.parameters()


def attribute(loop):
    loop.model.scale = 2.0


def inside_a_container(loop):
    loop.model.options["power"][0] = 3.0


def mode_of_a_layer(loop):
    loop.model.norm.eval()


def buffer_replaced(loop):
    loop.model.norm.running_var = loop.model.norm.running_var * 4.0


def buffer_written(loop):
    loop.model.norm.running_mean.data.add_(0.5)


def number_of_the_loss(loop):
    loop.weight = 3.0


def hook_on_a_module(loop):
    loop.model.first.register_forward_hook(lambda module, args, out: out * 1.5)


def accumulation(loop):
    loop.batches = 2


def clipping(loop):
    loop.bound = 0.05


def not_finite(loop):
    weight = loop.model.first.weight

    def between():
        weight.grad[0, 0] = float("nan")
        loop.between = None

    loop.between = between


def behind_the_counters(loop):
    loop.between = lambda: loop.model.first.weight.grad.data.mul_(0.5)


def zeroed_in_place(loop):
    zero_grad = loop.optimizer.zero_grad
    loop.optimizer.zero_grad = lambda: zero_grad(set_to_none=False)


def nothing(loop):
    pass


CHANGES = [
    nothing, learning_rate, learning_rate_in_every_step, other_options, add_param_group,
    between_groups, load_state_dict, state_cleared, state_in_place, state_moved, gone_and_back,
    frozen, weights_moved, less_precise, replaced_layer, attribute, inside_a_container,
    mode_of_a_layer, buffer_replaced, buffer_written, number_of_the_loss, hook_on_a_module,
    accumulation, clipping, not_finite, behind_the_counters, zeroed_in_place,
]  # fmt: skip


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-2)


def sgd(groups):
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def trained(change, make, **options):
    loop = Loop(make, **options)
    for step in range(STEPS):
        if step == CHANGED_AT:
            change(loop)
        loop.step()
    loop.run.close()
    history, steps = loop.run.history(), loop.run.steps()
    weights = [p.detach().clone() for p in loop.model.parameters()]
    return history, steps, weights, loop.model.state_dict()


@pytest.mark.filterwarnings("ignore:step .*void")
@pytest.mark.parametrize("options", [{}, {"estimator": ["secant+gauss2", "tangent", "sgd"]}])
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_gives_what_is_made_again(change, make, options, monkeypatch):
    if make is sgd and (change in (load_state_dict, state_moved) or options):
        pytest.skip("the same with adamw")
    kept = trained(change, make, **options)
    monkeypatch.setattr(Moved, "again", lambda self: False)
    monkeypatch.setattr(Reached, "unchanged", lambda self, modules, thorough=True: False)
    monkeypatch.setattr(Reached, "untouched", lambda self: False)
    made = trained(change, make, **options)
    assert kept[1]["void"].fillna("").tolist() == made[1]["void"].fillna("").tolist()
    if change not in (behind_the_counters, clipping, not_finite):
        assert kept[1]["void"].isna().all()
    values = [torch.tensor(h.filter(like="value").to_numpy(float)) for h in (kept[0], made[0])]
    tolerance = 1e-5 if change is less_precise else 1e-12
    torch.testing.assert_close(*values, rtol=tolerance, atol=1e-14, equal_nan=True)
    bitwise = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(kept[2], made[2], **bitwise)
    torch.testing.assert_close(kept[3], made[3], **bitwise)


def test_steps_that_repeat_are_kept(monkeypatch):
    """Otherwise the tests above compare nothing."""
    found = []
    again, unchanged, untouched = Moved.again, Reached.unchanged, Reached.untouched

    def noted(kind, f):
        def wrapper(*args):
            found.append((kind, f(*args)))
            return found[-1][1]

        return wrapper

    monkeypatch.setattr(Moved, "again", noted("moved", again))
    monkeypatch.setattr(Reached, "unchanged", noted("reached", unchanged))
    monkeypatch.setattr(Reached, "untouched", noted("after the passes", untouched))
    trained(nothing, adamw, halves_every=0)  # which have passes of their own
    moved = [up for kind, up in found if kind == "moved"]
    assert moved == [False, False] + [True] * (STEPS - 2)  # the first step makes the state
    assert [up for kind, up in found if kind == "reached"] == [True] * (STEPS - 1)
    assert [up for kind, up in found if kind == "after the passes"] == [True] * (2 * STEPS - 1)


def test_every_change_of_the_optimizer_is_noticed(monkeypatch):
    """By the check itself, not by values that may happen to be equal."""
    again = Moved.again
    for change in (
        add_param_group, between_groups, load_state_dict, state_cleared, state_in_place,
        state_moved, frozen, weights_moved, less_precise, replaced_layer,
    ):  # fmt: skip
        found = []

        def noted(self, found=found):
            found.append(again(self))
            return found[-1]

        monkeypatch.setattr(Moved, "again", noted)
        trained(change, adamw)
        assert found[2:CHANGED_AT] == [True] * (CHANGED_AT - 2), change
        assert found[CHANGED_AT] is False, change


def test_another_layout_at_the_same_address_is_noticed():
    """A kernel would read the numbers in another order."""
    from inrun.optimizers import rule_for

    p = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.AdamW([p])
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
    moved = Moved.of([(optimizer, rule_for(optimizer))])
    assert moved.again()
    p.data = p.data.t()
    assert not moved.again()
    moved = Moved.of([(optimizer, rule_for(optimizer))])
    own = optimizer.state[p]["exp_avg"]
    own.data = own.data.t()
    assert not moved.again()


def test_weights_in_half_precision_are_never_kept():
    p = nn.Parameter(torch.randn(4).bfloat16())
    optimizer = torch.optim.AdamW([p])
    from inrun.optimizers import rule_for

    for _ in range(3):
        p.grad = torch.randn_like(p)
        moved = Moved.of([(optimizer, rule_for(optimizer))])
        assert not moved.again()
        optimizer.step()
