"""Operations that are read from the autograd graph where the mode stands aside. (Gradients of all
models: test_standing_aside.py; models that change: test_changing_models.py.)"""

import pytest
import torch
from torch import nn

import inrun
from helpers.captures import gradients_of, trainable
from helpers.zoo import ZOO
from inrun.capture.capture import Capture

PASSES = 6
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Model(nn.Module):
    """Writes to the input of its second layer, once it is asked to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.writes = False
        self.double()

    def forward(self, x):
        x = torch.tanh(self.a(x))
        y = x * 2
        z = self.b(y)
        if self.writes:
            with torch.no_grad():
                y.add_(1.0)
        return self.c(torch.tanh(z))


def learned(model, **options):
    capture = Capture(model, dict(model.named_parameters()), **options)
    for _ in range(PASSES):
        with capture.batch(6):
            model(X).square().sum().backward()
    return capture


def plan_of(capture):
    (plan,) = (p for p in capture.aside.plans.values() if p is not None)
    return plan


@pytest.mark.parametrize("half", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize("name", ["llama", "llama-lora", "gpt2", "vit", "distilbert"])
def test_all_operations_of_such_models_are_read(name, half):
    problem = ZOO[name]()
    params = trainable(problem.model)
    found = []
    for passes in (PASSES, 1):  # the second capture sees the model for the first time
        capture = Capture(problem.model, params, batch_dim=problem.batch_dim)
        for _ in range(passes):
            problem.model.zero_grad()
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
            with capture.batch(problem.B) as micro:
                with autocast:
                    loss = problem.train_loss()
                loss.backward()
        assert micro.void is None
        own = {k: p.grad.clone() for k, p in params.items()}
        if passes == PASSES:
            plan = plan_of(capture)
            assert capture.aside.followed == 1 and plan.read > 0 and not plan.called
        found.append((gradients_of(micro), own))
    (read, own), (seen, expected) = found
    assert read.keys() == seen.keys()
    for k, g in expected.items():
        assert torch.equal(own[k], g), k  # the training itself
    for k, g in seen.items():
        torch.testing.assert_close(read[k], g, rtol=0, atol=0, msg=k)


def test_an_input_that_is_written_to_is_an_error_of_autograds_own():
    model = Model()
    capture = learned(model)
    assert plan_of(capture).read == 2
    model.writes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), capture.batch(6):
        model(X).square().sum().backward()
    model.writes = False
    with capture.batch(6) as micro:
        model(X).square().sum().backward()
    assert micro.void is None and gradients_of(micro)["b.weight"].shape == (6, 4, 4)


def test_data_that_is_refilled_after_the_backward_pass_is_copied():
    """The inputs of a layer behind frozen ones are the loop's own tensor."""

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.double()

        def forward(self, x, scale):
            return self.b(torch.tanh(self.a(x)) * scale)

    model = Tail()
    capture = Capture(model, dict(model.named_parameters()))
    for _ in range(PASSES + 1):
        x, scale = X.clone(), torch.full((6, 1), 2.0, dtype=torch.float64)
        with capture.batch(6) as micro:
            model(x, scale).square().sum().backward()
        x.zero_()
        scale.zero_()
        rows = gradients_of(micro)
    model.zero_grad()
    model(X[:1], torch.full((1, 1), 2.0, dtype=torch.float64)).square().sum().backward()
    for k, p in model.named_parameters():
        torch.testing.assert_close(rows[k][0], p.grad)


def test_a_gradient_that_is_differentiated_again_is_refused():
    model = Model()
    capture = learned(model)
    with pytest.raises(inrun.CaptureError, match="create_graph"), capture.batch(6):
        model(X).square().sum().backward(create_graph=True)


def test_two_backward_passes_through_one_graph_add_up():
    model = Model()
    capture = learned(model)
    with capture.batch(6) as once:
        model(X).square().sum().backward()
    single = gradients_of(once)
    with capture.batch(6) as twice:
        loss = model(X).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for k, g in gradients_of(twice).items():
        torch.testing.assert_close(g, 2 * single[k])


def test_a_pass_without_a_backward_pass_leaves_nothing():
    model = Model()
    capture = learned(model)
    with capture.batch(6) as micro:
        kept = model(X).square().sum()  # of a gradient that the loop does not want
        model(X).square().sum().backward()
    single = gradients_of(micro)
    with capture.batch(6) as micro:
        model(X).square().sum().backward()
    for k, g in gradients_of(micro).items():
        torch.testing.assert_close(single[k], g)
    kept.backward()  # after the batch: nobody's
    for k, g in gradients_of(micro).items():
        torch.testing.assert_close(single[k], g)


def test_gradients_from_outside_are_found_where_operations_are_read():
    """What is in .grad when a backward pass begins is looked at before anything is added."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(
        model, optimizer, validation=[X], loss=lambda m, x: m(x).square().mean(), audit_every=0
    )
    for step in range(PASSES + 3):
        with run.batch(range(6)):
            loss = model(X).square().mean()
            if step == PASSES + 1:
                model.a.weight.grad = torch.ones_like(model.a.weight)
            loss.backward()
        if step == PASSES + 1:
            with pytest.warns(UserWarning, match="from outside run.batch"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    void = run.steps()["void"]
    assert [n for n in range(len(void)) if isinstance(void[n], str)] == [PASSES + 1]


def test_records_that_go_to_the_host_at_once_are_not_read():
    model = Model()
    capture = learned(model, offload=True)
    assert capture.aside.followed == 1 and plan_of(capture).read == 0
