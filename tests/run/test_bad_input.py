"""Each mistake gets its own message, and nothing recorded is lost."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.scoring.received import all_finite

X, Y = torch.zeros(30, 4), torch.zeros(30, dtype=torch.long)


@pytest.fixture(autouse=True)
def _data(_settings):
    """Drawn anew for each test, in its precision, whatever the tests before it did."""
    X.data, Y.data = torch.randn(30, 4), torch.randint(0, 3, (30,))


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def setup(model=None, **options):
    X.data, Y.data = torch.randn(30, 4), torch.randint(0, 3, (30,))
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"validation": [(X[:6], Y[:6])], "loss": loss} | options
    return model, optimizer, inrun.watch(model, optimizer, **options)


def step(model, optimizer, run, ids=None, rows=None):
    rows = torch.arange(8) if rows is None else rows
    with run.batch(rows if ids is None else ids):
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
    optimizer.step()
    optimizer.zero_grad()


def fails_but_loses_nothing(message, kind, act, **options):
    """One good step, the mistake, another good step: two steps recorded."""
    model, optimizer, run = setup(**options)
    step(model, optimizer, run)
    with pytest.raises(kind, match=message):
        act(model, optimizer, run)
    optimizer.zero_grad()
    step(model, optimizer, run)
    scored = run.history()["step"].unique()
    assert len(scored) == 2
    assert len(run.values()) == 8


def test_ids_of_the_wrong_length_are_refused():
    fails_but_loses_nothing(
        r"got 7 ids, but no tensor .* shapes seen: .*\(30, 4\)", inrun.BatchError,
        lambda m, o, r: step(m, o, r, ids=range(7)),
    )  # fmt: skip


def test_ids_of_mixed_type_are_refused():
    fails_but_loses_nothing(
        "all integers or all strings", inrun.BatchError,
        lambda m, o, r: step(m, o, r, ids=[1, 2, 3, "4", 5, 6, 7, 8]),
    )  # fmt: skip


def test_ids_that_change_type_between_batches_are_refused():
    fails_but_loses_nothing(
        "the same in the whole run", inrun.BatchError,
        lambda m, o, r: step(m, o, r, ids=list("abcdefgh")),
    )  # fmt: skip


def test_a_batch_without_ids_is_refused():
    fails_but_loses_nothing("got no ids", inrun.BatchError, lambda m, o, r: step(m, o, r, ids=[]))


def test_duplicate_ids_add_up():
    model, optimizer, run = setup()
    with run.batch([7, 7, 7, 9]):
        F.cross_entropy(model(X[:4]), Y[:4]).backward()
    optimizer.step()
    values, history = run.values().set_index("id")["value"], run.history()
    assert values[7] == pytest.approx(history["value"][:3].sum())
    assert values[9] == pytest.approx(history["value"][3])


def test_batches_without_backward_do_not_count():
    """A loop that skips batches whose loss is not finite, a forward pass alone, nothing at all."""
    model, optimizer, run = setup()
    step(model, optimizer, run)

    def skipping(kind):
        with run.batch(range(20, 28)):
            if kind != "nothing":
                value = F.cross_entropy(model(X[:8]), Y[:8]) * float("nan")
                if kind == "loss" and not torch.isfinite(value):
                    return
            if kind == "other shapes" and X.sum() != 0:
                return

    with pytest.warns(UserWarning, match=r"without a backward\(\).*Said once") as said:
        for kind in ("loss", "forward", "nothing", "other shapes"):
            skipping(kind)
    assert len(said) == 1 and run._empty.count == 4
    step(model, optimizer, run)
    assert run.history()["step"].tolist() == [0] * 8 + [1] * 8
    assert run.values()["id"].tolist() == list(range(8)) and run.unwatched == 0


def test_a_skipped_batch_between_others_of_a_step_does_not_count():
    """Gradient accumulation: the values are those of a step without the skipped batch."""
    found = []
    for skip in (False, True):
        torch.manual_seed(0)
        model, optimizer, run = setup()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for at in (0, 4, 8):
                if at == 4 and not skip:
                    continue
                with run.batch(range(at, at + 4)):
                    value = F.cross_entropy(model(X[at : at + 4]), Y[at : at + 4])
                    if at == 4:
                        continue
                    value.backward()
        optimizer.step()
        found.append(run.values())
    np.testing.assert_array_equal(found[0].to_numpy(), found[1].to_numpy())
    assert len(found[0]) == 8


def test_an_exception_in_a_batch_leaves_all_as_it_was():
    model, optimizer, run = setup()
    with run.batch(range(4)):
        F.cross_entropy(model(X[:4]), Y[:4]).backward()
    for after in (False, True):
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(KeyError), run.batch(range(4, 8)):
            value = F.cross_entropy(model(X[4:8]), Y[4:8])
            if after:
                value.backward()
            raise KeyError("in the loop")
        for p, g in zip(model.parameters(), before, strict=True):
            p.grad = g
    optimizer.zero_grad()
    step(model, optimizer, run)
    assert len(run.history()) == 8 and run.steps()["void"].isna().all()


def test_a_batch_inside_a_batch_is_refused():
    def act(model, optimizer, run):
        with run.batch(range(8)), run.batch(range(8)):
            pass

    fails_but_loses_nothing("one batch at a time", inrun.BatchError, act)


def test_a_step_inside_a_batch_is_refused():
    def act(model, optimizer, run):
        with run.batch(range(8)):
            loss(model, (X[:8], Y[:8])).backward()
            optimizer.step()

    fails_but_loses_nothing("step after the with block", inrun.BatchError, act)


def test_examples_that_cannot_be_told_apart_are_refused():
    class Mixer(nn.Module):
        """Adds another example to each."""

        def __init__(self):
            super().__init__()
            self.expert = nn.Linear(4, 3)

        def forward(self, x):
            return self.expert(x + x.flip(0))

    model, optimizer, run = setup(Mixer())
    with pytest.raises(
        inrun.CaptureError, match=r"expert\.bias, expert\.weight .*'linear'.*since 'add'.*ignore="
    ):
        step(model, optimizer, run)


def test_an_operation_without_a_rule_names_parameter_and_ways_out():
    class Native(nn.Module):
        """Calls an operation of torch that has three outputs and no rule."""

        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x):
            w, b = self.norm.weight, self.norm.bias
            return self.head(torch.native_layer_norm(x, [4], w, b, 1e-5)[0])

    model, optimizer, run = setup(Native())
    with pytest.raises(
        inrun.CaptureError, match=r"norm\.weight.*'native_layer_norm'.*no rule.*register_op"
    ):
        step(model, optimizer, run)
    run.close()
    optimizer.zero_grad()
    names = [k for k, _ in model.named_parameters() if k.startswith("norm")]
    run = inrun.watch(model, optimizer, validation=[(X, Y)], loss=loss, ignore=names)
    step(model, optimizer, run)
    assert set(run.coverage().query("status == 'ignored'")["parameter"]) == set(names)


@pytest.mark.parametrize("good", [0, 1, 5])
def test_gradients_from_outside_the_batch_are_noticed(good):
    """The step is void and training goes on, at the first step and later."""
    model, optimizer, run = setup(audit_every=0)
    for _ in range(good):
        step(model, optimizer, run)
    (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    with pytest.warns(UserWarning, match="gradients from outside run.batch.*zero_grad"):
        step(model, optimizer, run)
    step(model, optimizer, run)
    assert run.steps()["void"].notna().tolist() == [False] * good + [True, False]


def test_a_custom_autograd_function_is_noticed():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.t() @ x

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(Twice.apply(x, self.w))

    model, optimizer, run = setup(Custom())
    with pytest.raises(
        inrun.CaptureError, match="parameter w received a gradient, but no operation"
    ):
        step(model, optimizer, run)


def test_gradient_penalties_are_refused():
    model, _, run = setup()
    with pytest.raises(inrun.CaptureError, match="create_graph"), run.batch(range(8)):
        x = X[:8].clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()


def test_steps_without_batch_are_counted_and_warned_of_once():
    model, optimizer, run = setup()
    step(model, optimizer, run)
    loss(model, (X, Y)).backward()
    with pytest.warns(UserWarning, match="step 1 without run.batch"):
        optimizer.step()
    optimizer.step()  # no second warning: warnings are errors here
    optimizer.zero_grad()
    step(model, optimizer, run)
    assert run.unwatched == 2
    assert run.history()["step"].unique().tolist() == [0, 3]


def test_a_second_watch_on_one_model_is_refused():
    model, optimizer, run = setup()
    with pytest.raises(RuntimeError, match="watched already"):
        inrun.watch(model, optimizer, validation=[(X, Y)], loss=loss)
    run.close()
    inrun.watch(model, optimizer, validation=[(X, Y)], loss=loss).close()


def test_a_batch_after_close_is_refused():
    _, _, run = setup()
    run.close()
    with pytest.raises(inrun.BatchError, match="closed"), run.batch(range(8)):
        pass


def test_a_validation_loss_that_is_not_a_scalar_is_refused():
    model, optimizer, run = setup(
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")
    )
    with pytest.raises(inrun.ValidationError, match=r"must be a scalar.*shape \(6,\)"):
        step(model, optimizer, run)


def test_a_detached_validation_loss_is_refused():
    model, optimizer, run = setup(loss=lambda m, b: loss(m, b).detach())
    with pytest.raises(inrun.ValidationError, match="does not depend on"):
        step(model, optimizer, run)


def test_the_default_loss_explains_itself():
    _, _, run = setup(loss=None)
    model, optimizer = run.model, run.optimizer
    with pytest.raises(inrun.ValidationError, match=r"model\(\*\*batch\)\.loss"):
        step(model, optimizer, run)


UNUSABLE = {"empty": [], "iterator": iter([1]), "tensor": torch.ones(3, 4)}


@pytest.mark.parametrize("validation", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_validation_is_refused(validation):
    with pytest.raises(inrun.ValidationError):
        setup(validation=validation)


def test_neither_or_both_of_validation_and_targets_is_refused():
    for options in ({"validation": None}, {"targets": {"a": [(X, Y)]}}):
        with pytest.raises(inrun.ValidationError, match=r"either validation= .* or targets="):
            setup(**options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_validation_loss_makes_the_step_void(bad):
    factor = [1.0]
    model, optimizer, run = setup(loss=lambda m, b: loss(m, b) * factor[0])
    step(model, optimizer, run)
    factor[0] = bad
    step(model, optimizer, run)
    factor[0] = 1.0
    step(model, optimizer, run)
    assert run.steps()["void"].notna().tolist() == [False, True, False]
    assert "validation loss" in run.steps()["void"][1]
    assert np.isfinite(run.values()["value"]).all()
    assert (run.values()["steps"] == 3).all() and (run.values()["scored"] == 2).all()


def test_non_finite_training_gradients_make_the_step_void():
    model, optimizer, run = setup()
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, run)
    with run.batch(range(8)):
        (loss(model, (X[:8], Y[:8])) * float("inf")).backward()
    optimizer.step()
    assert "training gradient" in run.steps()["void"][1]
    assert len(run.history()) == 8


@pytest.mark.parametrize(
    ("numbers", "dtype", "finite"),
    [
        ([3e38, 3e38], torch.float32, True),  # their sum is not
        ([6e4] * 8, torch.float16, True),
        ([float("inf"), -float("inf")], torch.float64, False),
        ([1.0, float("nan")], torch.float32, False),
    ],
)
def test_large_gradients_are_finite(numbers, dtype, finite):
    fine = torch.ones(3, dtype=torch.float64)
    assert bool(all_finite([fine, torch.tensor(numbers, dtype=dtype)])) is finite


def test_a_model_with_nothing_to_train_is_refused():
    model = nn.Linear(4, 3).requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="nothing to watch"):
        inrun.watch(model, optimizer, validation=[(X, Y)], loss=loss)


def test_unknown_options_are_refused():
    for options, message in (
        ({"estimator": "newton"}, "'newton' is not known"),
        ({"point": "end"}, "'end' is not known"),
        ({"training": "quick"}, "'quick' is not known"),
        ({"form": "dense"}, "'dense' is not known"),
        ({"ignore": ["head"]}, "does not have: 'head'"),
        ({"every": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            setup(**options)
    _, _, run = setup()
    with pytest.raises(inrun.LedgerError, match="was not recorded"):
        run.values("tangent")


@pytest.mark.parametrize("name", ["LBFGS", "Rprop", "SparseAdam"])
def test_optimizers_that_cannot_be_watched_are_refused(name):
    model = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, name)(model.parameters())
    with pytest.raises(TypeError, match=name):
        inrun.watch(model, optimizer, validation=[(X, Y)], loss=loss)


def test_captures_that_do_not_fit_are_refused_and_smaller_ones_go_on():
    model, optimizer, run = setup(memory_limit=1000)
    with pytest.raises(MemoryError, match="offload=True"):
        step(model, optimizer, run)
    optimizer.zero_grad()
    step(model, optimizer, run, rows=torch.arange(2))
    assert run.values()["id"].tolist() == [0, 1]


def test_offloading_changes_nothing():
    torch.manual_seed(0)
    model, optimizer, run = setup()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    step(model, optimizer, run)
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    other.load_state_dict(start)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    again = inrun.watch(other, optimizer, validation=[(X[:6], Y[:6])], loss=loss, offload=True)
    step(other, optimizer, again)
    assert np.allclose(run.values()["value"], again.values()["value"], rtol=1e-12)
