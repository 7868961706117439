"""Autocast's cache of weights: evaluation at other weights neither reads nor writes it."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.tensors.autocast import uncached

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
Y = (X[:, 0] > 0).long()
VALIDATION = X[:16] + 0.1, Y[:16]


def half():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def model_and_optimizer():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).float()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-2)


def loss_in(context):
    def loss(model, batch):
        with context() as _:
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    return loss


def trained(loss, estimator, targets=None):
    model, optimizer = model_and_optimizer()
    data = {"validation": [VALIDATION]} if targets is None else {"targets": targets}
    options = {"loss": loss, "estimator": estimator, "audit_every": 1} | data
    with inrun.watch(model, optimizer, **options) as run:
        for t in range(4):
            rows = torch.arange(8 * t, 8 * t + 8)
            with run.batch(rows):
                loss(model, (X[rows], Y[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()
        names = [estimator] if isinstance(estimator, str) else estimator
        return [(run.history(e), run.steps(e)) for e in names]


@pytest.mark.parametrize("estimator", ["secant", ["sgd", "secant"], "secant+gauss2"])
@pytest.mark.parametrize("Q", [1, 2])
def test_one_context_for_all_passes_is_like_a_new_one_for_each(estimator, Q):
    targets = None if Q == 1 else {f"t{q}": [(X[8 * q : 8 * q + 8], Y[:8])] for q in range(Q)}
    once = half()
    new, reused = (trained(loss_in(c), estimator, targets) for c in (half, lambda: once))
    for (values, steps), (same, same_steps) in zip(new, reused, strict=True):
        assert values.equals(same) and steps.equals(same_steps)
        assert (steps["batch_share"] != 0).all()


@pytest.mark.parametrize("estimator", ["secant", "sgd"])
def test_a_context_that_is_open_around_the_step(estimator):
    """The user's copies stay in the cache, ours do not come into it, and it is left as entered."""

    def loop(watched):
        context = half()  # the same object in the training and in the validation loss
        model, optimizer = model_and_optimizer()
        inside = loss_in(lambda: context)
        run = None
        if watched:
            run = inrun.watch(
                model, optimizer, validation=[VALIDATION], loss=inside, estimator=estimator
            )
        seen = []
        for t in range(3):
            rows = torch.arange(8 * t, 8 * t + 8)
            with context:
                if run is None:
                    F.cross_entropy(model(X[rows]).float(), Y[rows]).backward()
                else:
                    with run.batch(rows):
                        F.cross_entropy(model(X[rows]).float(), Y[rows]).backward()
                optimizer.step()
                seen.append(model(X[rows]).detach())  # from the cache: before the step
                assert torch.is_autocast_cache_enabled() and torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cpu")
            seen.append(model(X[rows]).detach())
            optimizer.zero_grad()
        return [*seen, *model.state_dict().values()], run

    (plain, _), (watched, run) = loop(False), loop(True)
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a, b)

    new = half

    def apart():
        """The same training, validated with a new context each time."""
        model, optimizer = model_and_optimizer()
        with inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=loss_in(new), estimator=estimator
        ) as other:
            for t in range(3):
                rows = torch.arange(8 * t, 8 * t + 8)
                with half(), other.batch(rows):
                    F.cross_entropy(model(X[rows]).float(), Y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
            return other.history()

    assert run.history().equals(apart())
    run.close()


def test_the_cache_is_off_in_one_thread_only():
    weight, x = nn.Parameter(torch.ones(4, 4, dtype=torch.float32)), torch.ones(4, 4).float()
    context = half()
    found = {}

    def other():
        with context_of_thread:
            found["enabled"] = torch.is_autocast_cache_enabled()

    context_of_thread = half()
    with uncached(), uncached():
        with context:
            assert not torch.is_autocast_cache_enabled()
            first = F.linear(x, weight)
            weight.data = copy.deepcopy(weight.data) * 2
            assert torch.equal(F.linear(x, weight), 2 * first)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found["enabled"] and torch.is_autocast_cache_enabled()
    with half():
        assert torch.is_autocast_cache_enabled()
    assert torch.set_autocast_cache_enabled is torch._C.set_autocast_cache_enabled
