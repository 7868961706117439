"""A penalty on weights inside the loss is nobody's, in a batch of any size. A parameter that meets
the mean of all losses other than by adding is refused: what each example does to it is not known.
"""

import pytest
import torch
from torch import nn

from helpers.captures import trainable
from inrun import CaptureError
from inrun.capture.capture import Capture
from inrun.gradients.nodes import pull_back


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)
        self.s = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def penalty(m):
    return 0.1 * sum(p.square().sum() for p in m.parameters())


def added(losses, more):
    losses += more
    return losses


# The loss, of the losses of the examples; how much of their mean and of the penalty it is
PENALTIES = {
    "added": (lambda m, r: r.mean() + penalty(m), 1, 1),
    "added to": (lambda m, r: penalty(m) + r.mean(), 1, 1),
    "subtracted": (lambda m, r: r.mean() - penalty(m), 1, -1),
    "in place": (lambda m, r: added(r.mean(), penalty(m)), 1, 1),
    "scaled": (lambda m, r: 1024 * ((r.mean() + penalty(m)) / 2), 512, 512),
    "stacked": (lambda m, r: torch.stack([r.mean(), penalty(m)]).sum(), 1, 1),
    "a sum of rows": (lambda m, r: sum(r.unbind()) / len(r) + penalty(m), 1, 1),
    "two losses": (lambda m, r: [r.mean(), penalty(m)], 1, 1),
}
MULTIPLIED = {
    "uncertain": lambda m, r: torch.exp(-m.s) * r.mean() + m.s,
    "times": lambda m, r: m.s * r.mean(),
    "divided": lambda m, r: r.mean() / m.s,
    "by a penalty": lambda m, r: r.mean() * (1 + penalty(m)),
    "log": lambda m, r: (r.mean() + penalty(m)).log(),
    "divided by": lambda m, r: 1 / (r.mean() + penalty(m)),
    "by itself": lambda m, r: (r.mean() + m.s) * (r.mean() + m.s),
}


def rows_of(micro, params):
    """[B + 1, *W] for each parameter; the last is nobody's."""
    rows = {k: torch.zeros(micro.B + 1, *p.shape) for k, p in params.items()}
    for node, records in micro.records.items():
        for record in records:
            for k, g in pull_back(node, record.rows()).items():
                rows[k][: len(g)] += g
    return rows


def gradients(loss, params):
    found = torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True)
    found = [
        torch.zeros_like(p) if g is None else g for g, p in zip(found, params.values(), strict=True)
    ]
    return dict(zip(params, found, strict=True))


def setting(B):
    model, x, y = Net(), torch.randn(B, 6), torch.randn(B, 3)
    return model, trainable(model), lambda: (model(x) - y).pow(2).sum(1)


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_nobodys(name, B):
    loss, of_mean, of_penalty = PENALTIES[name]
    model, params, losses = setting(B)
    capture = Capture(model, params)
    for _ in range(2):
        with capture.batch(B) as micro:
            found = loss(model, losses())
            torch.autograd.backward(found)
        got, r = rows_of(micro, params), losses()
        expected = [gradients(of_mean * r[i] / B, params) for i in range(B)]
        expected.append(gradients(of_penalty * penalty(model), params))
        for k in params:
            assert torch.allclose(got[k], torch.stack([g[k] for g in expected]), rtol=1e-9)


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_parameter_that_meets_the_mean_of_all_losses_is_refused(name):
    model, params, losses = setting(4)
    with (
        pytest.raises(CaptureError, match=r"meets a number .* of all examples .* operation '"),
        Capture(model, params).batch(4),
    ):
        MULTIPLIED[name](model, losses()).backward()


@pytest.mark.parametrize("name", MULTIPLIED)
def test_of_a_batch_of_one_example_it_is_that_examples(name):
    """All of it: a parameter that is added is taken for the bias of the model's one output."""
    model, params, losses = setting(1)
    capture = Capture(model, params)
    with capture.batch(1) as micro:
        MULTIPLIED[name](model, losses()).backward()
    got, whole = rows_of(micro, params), gradients(MULTIPLIED[name](model, losses()), params)
    for k in params:
        assert torch.allclose(got[k].sum(0), whole[k], rtol=1e-9)
        assert not got[k][1:].any()


def test_the_bias_of_a_model_with_one_output_is_the_only_examples():
    """``squeeze()`` leaves a number where the batch has one example."""
    x, bias = torch.randn(1, 6), nn.Parameter(torch.tensor(0.2))
    model = nn.Linear(6, 1)
    model.register_parameter("offset", bias)
    params = dict(model.named_parameters())
    with Capture(model, params).batch(1) as micro:
        (model(x).squeeze() + model.offset).square().backward()
    got = rows_of(micro, params)
    for k, p in params.items():
        assert torch.allclose(got[k][0], p.grad, rtol=1e-9) and not got[k][1:].any()
