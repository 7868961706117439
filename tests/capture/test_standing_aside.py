"""The mode is taken off where the rest of a forward pass is known. (Models that change their mind:
test_changing_models.py.)"""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import inrun
from helpers.captures import gradients_of, reference_rows, trainable
from helpers.zoo import ZOO
from inrun.capture import aside
from inrun.capture.capture import Capture
from inrun.torch_compat import top_mode

# A parameter that is cut or turned round right before its use keeps the mode on to the end.
LEFT_TO_THE_MODE = {"gpt", "lstm", "lstm-sequence-first", "gru"}


def step(capture, problem):
    problem.model.zero_grad()
    with capture.batch(problem.B) as micro:
        problem.train_loss().backward()
    return micro


@pytest.mark.parametrize("fast", [False, True], ids=["bitwise", "fast"])
@pytest.mark.parametrize("name", ZOO)
def test_the_same_gradients_as_under_the_mode(name, fast):
    problem = ZOO[name]()
    params = trainable(problem.model)
    capture = Capture(problem.model, params, batch_dim=problem.batch_dim, fast=fast)
    for _ in range(6):
        micro = step(capture, problem)
    assert micro.void is None
    assert (capture.aside.followed == 1) == (name not in LEFT_TO_THE_MODE)
    found, own = gradients_of(micro), [p.grad.clone() for p in params.values()]
    mode = Capture(problem.model, params, batch_dim=problem.batch_dim, fast=fast)
    expected = gradients_of(step(mode, problem))
    assert found.keys() == expected.keys()
    if name != "convnet-batchnorm":  # its running statistics move
        exact = {"rtol": 1e-9, "atol": 1e-12} if fast else {"rtol": 0, "atol": 0}
        for k, g in expected.items():
            torch.testing.assert_close(found[k], g, **exact)
        for g, p in zip(own, params.values(), strict=True):
            torch.testing.assert_close(g, p.grad, **exact)
    for k, g in reference_rows(problem).items():
        torch.testing.assert_close(found[k], g, rtol=1e-6, atol=1e-9)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def learned(model, passes=5, **options):
    capture = Capture(model, dict(model.named_parameters()), **options)
    for _ in range(passes):
        with capture.batch(3) as micro:
            model(X[:3]).square().sum().backward()
    assert capture.aside.followed == 1
    return capture, micro


@pytest.mark.parametrize("form", ["auto", "materialise"])
def test_few_calls_reach_python(form, monkeypatch):
    model, seen = small(), []
    call = aside.Aside.call
    monkeypatch.setattr(aside.Aside, "call", lambda s, f, a, k: seen.append(f) or call(s, f, a, k))
    capture, _ = learned(model, form=form)
    seen.clear()
    before = capture.interceptor.calls
    with capture.batch(3):
        model(X[:3]).square().sum().backward()
    # the first layer is the stem; what is remembered is read from the graph
    assert len(seen) == (2 if form == "materialise" else 0)
    assert capture.interceptor.calls - before <= 5


def test_an_exception_leaves_everything_as_it_was():
    model = small()
    capture, _ = learned(model)

    def fails(module, args):
        raise KeyError("of the user's")

    hook = model[3].register_forward_pre_hook(fails)
    with pytest.raises(KeyError, match="of the user's"), capture.batch(3):
        model(X[:3])
    hook.remove()
    assert top_mode() is None
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not model[1]._forward_pre_hooks
    with capture.batch(3) as micro:
        model(X[:3]).square().sum().backward()
    assert micro.void is None and gradients_of(micro)["0.weight"].shape == (3, 4, 4)


def test_another_shape_is_learned_anew_and_the_first_is_remembered():
    model = small()
    capture, _ = learned(model)
    for B, follows in ((5, 0), (3, 1), (5, 0)):
        with capture.batch(B) as micro:
            model(X[:B]).square().sum().backward()
        assert capture.aside.followed == follows and micro.void is None


def test_two_calls_and_an_evaluation_in_one_batch():
    model = small()
    capture, _ = learned(model)
    a, b = X[:3], X[3:]
    expected = []
    for own in (capture, Capture(model, dict(model.named_parameters()))):
        with own.batch(3) as micro:
            first = model(a)
            with torch.no_grad():
                model.eval()(a)
                model.train()
            (first * model(b)).sum().backward()
        expected.append(gradients_of(micro))
    assert all(torch.equal(expected[0][k], g) for k, g in expected[1].items())


def test_a_mode_of_the_users_keeps_ours_on():
    class Own(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = small()
    capture, _ = learned(model)
    with capture.batch(3) as micro, Own():
        model(X[:3]).square().sum().backward()
    assert capture.aside.followed == 0 and micro.void is None
    assert gradients_of(micro)["0.weight"].shape == (3, 4, 4)


def test_copies_made_inside_are_plain_and_another_thread_is_not_watched():
    model, found = small(), {}
    capture, _ = learned(model, form="materialise")  # calls that reach Python

    def look(module, args):
        if all(type(p) is nn.Parameter for p in model.parameters()):
            return
        found["copy"] = copy.deepcopy(module)
        other = threading.Thread(
            target=lambda: found.update(y=model[2](torch.ones(1, 4, dtype=torch.float64)))
        )
        other.start()
        other.join()

    hook = model[4].register_forward_pre_hook(look)
    with capture.batch(3) as micro:
        model(X[:3]).square().sum().backward()
    hook.remove()
    assert type(found["copy"].weight) is nn.Parameter and "y" in found
    assert micro.void is None and micro.records


def test_a_void_step_is_recorded_and_the_next_is_scored():
    """The user's model turns its rows round in one step."""
    model, turned = small(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model[3].register_forward_hook(lambda m, args, out: out.flip(0) if turned else out)
    x = X
    run = inrun.watch(model, optimizer, validation=[x], audit_every=0,
                      loss=lambda m, batch: m(batch).square().mean())  # fmt: skip
    for n in range(9):
        turned[:] = [1] if n == 6 else []
        before = [p.detach().clone() for p in model.parameters()]
        with run.batch(range(6)):
            model(x).square().mean().backward()
        if n == 6:
            with pytest.warns(UserWarning, match="another than in the steps before"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before[0], model[0].weight)
    void = run.steps()["void"]
    assert [n for n in range(9) if isinstance(void[n], str)] == [6]
    assert void[6] == aside.CHANGED
