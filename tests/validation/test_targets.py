"""Many targets in one pass: the values of as many runs with one target each."""

import copy
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from helpers.inside import are_joined
from helpers.zoo import GPT, ZOO, V
from inrun.gradients.embedding import Lookup
from inrun.scoring import contraction, sharded
from inrun.validation.joining import Joining
from inrun.validation.sweep import joined

IDS = torch.randint(0, V, (60, 5), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(60, 2, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
POINTS = torch.randn(60, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(4))


def next_token(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def classes(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def language():
    return GPT(layers=1), IDS, next_token


def mlp():
    return ZOO["mlp"]().model, (POINTS, LABELS), classes


def convnet():
    return ZOO["convnet-groupnorm"]().model, (IMAGES, LABELS), classes


def batchnorm():
    return ZOO["convnet-batchnorm"]().model, (IMAGES, LABELS), classes


def vit():
    return ZOO["vit"]().model, (IMAGES[:, :1], LABELS), classes


MODELS = {f.__name__: f for f in (language, mlp, convnet, batchnorm, vit)}


def cut(data, first, n):
    if isinstance(data, tuple):
        return tuple(x[first : first + n] for x in data)
    return data[first : first + n]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def trained(
    first, data, loss, targets, steps=3, val_loss=None, optimizer=adamw, parts=1, **options
):
    model = copy.deepcopy(first)
    opt = optimizer(model)
    options = {"audit_every": 0, "estimator": "secant"} | options
    with inrun.watch(model, opt, targets=targets, loss=val_loss or loss, **options) as run:
        for step in range(steps):
            for rows in torch.arange(6 * step, 6 * step + 6).chunk(parts):
                with run.batch(rows):
                    (loss(model, cut(data, int(rows[0]), len(rows))) / parts).backward()
            opt.step()
            opt.zero_grad()
    return run


def refused():
    return pytest.warns(UserWarning, match="cannot be joined in one pass, so each has its own")


def assert_as_apart(first, data, loss, targets, together=True, said=False, rtol=1e-9, **options):
    """One run with all targets against one run for each. ``said``: that they are not joined."""
    with refused() if said else nullcontext():
        run = trained(first, data, loss, targets, **options)
    assert are_joined(run) == together
    for name, batches in targets.items():
        one = trained(first, data, loss, {name: batches}, **options)
        for estimator in options.get("estimator", ["secant"]):
            got, expected = run.history(estimator), one.history(estimator)
            assert got["step"].tolist() == expected["step"].tolist(), "no step is void"
            column = name if name in expected else "value"
            scale = expected[column].abs().max()
            assert np.allclose(got[name], expected[column], rtol=rtol, atol=rtol * scale), name
    return run


def equal(data, Q=3, rows=2, batches=1):
    return {
        f"t{q}": [cut(data, 20 + rows * (q * batches + b), rows) for b in range(batches)]
        for q in range(Q)
    }


def unequal(data):
    return {f"t{q}": [cut(data, 20 + 5 * q, n)] for q, n in enumerate((1, 4, 2))}


@pytest.mark.parametrize("name", MODELS)
def test_targets_of_equal_size_share_a_pass(name):
    first, data, loss = MODELS[name]()
    assert_as_apart(first, data, loss, equal(data))


@pytest.mark.parametrize("name", MODELS)
def test_targets_of_unequal_size_share_a_pass(name):
    first, data, loss = MODELS[name]()
    assert_as_apart(first, data, loss, unequal(data))


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_targets_share_a_pass_in_every_form_and_training(form, training):
    first, data, loss = language()
    assert_as_apart(first, data, loss, unequal(data), form=form, training=training)


def test_several_batches_per_step_share_a_pass():
    first, data, loss = language()
    assert_as_apart(first, data, loss, equal(data, batches=3), per_step=2)


def test_several_batches_of_unequal_sizes_have_a_pass_per_target():
    """The mean of two means is not the mean over the rows."""
    first, data, loss = mlp()
    targets = {f"t{q}": [cut(data, 20, 2), cut(data, 25, 3 + q)] for q in range(2)}
    assert_as_apart(first, data, loss, targets, together=False, per_step=2)


def test_estimators_and_points_share_a_pass():
    first, data, loss = mlp()
    kinds = ["secant", "secant+gauss2", "tangent", "sgd"]
    assert_as_apart(first, data, loss, unequal(data), estimator=kinds)


def test_two_points_share_a_pass():
    first, data, loss = language()
    assert_as_apart(first, data, loss, equal(data), point="gauss2")


def test_targets_share_a_pass_while_gradients_accumulate():
    first, data, loss = language()
    assert_as_apart(first, data, loss, equal(data), parts=2)


def test_audits_verify_again():
    first, data, loss = language()
    run = assert_as_apart(first, data, loss, equal(data), audit_every=1)
    assert run.steps()["explained"].notna().all()


@pytest.mark.filterwarnings("ignore:the loss inside run.batch also trains")
def test_targets_share_a_pass_with_muon():
    first, data, loss = language()

    def muon(model):
        return torch.optim.Muon(
            [p for k, p in model.named_parameters() if "mlp" in k and p.ndim == 2]
        )

    assert_as_apart(first, data, loss, equal(data), optimizer=muon)


@pytest.mark.filterwarnings("ignore:the loss inside run.batch also trains")
def test_unscored_parameters_do_not_hinder_a_shared_pass():
    first, data, loss = language()
    first.norm.requires_grad_(False)

    def some(model):
        return torch.optim.SGD([p for k, p in model.named_parameters() if "mlp" in k], lr=0.1)

    assert_as_apart(first, data, loss, equal(data), optimizer=some)


@pytest.mark.parametrize(
    ("Q", "fit", "expected"),
    [
        (7, 100, 7),
        (7, 3, 3),
        (7, 0, 1),
        (330, 60, 60),
        (330, 64, 64),
        (330, 150, 128),
        (70, 99, 70),
    ],
)
def test_as_many_targets_as_the_kernel_takes_together(Q, fit, expected):
    assert contraction._targets_at_once(Q, fit) == expected


def test_more_targets_than_fit_at_once(monkeypatch):
    first, data, loss = mlp()
    monkeypatch.setattr(contraction, "MEMORY", 70)
    assert_as_apart(first, data, loss, equal(data, Q=7, rows=1))


class Tied(nn.Module):
    """A head that is the table itself, as Hugging Face ties them."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(V, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return F.linear(torch.tanh(self.mix(self.embed(ids))), self.embed.weight)


@pytest.mark.parametrize("training", ["bitwise", "fast"])
def test_a_tied_table_whose_gradients_are_formed(training, monkeypatch):
    """Its look-ups are added to them, and nothing to the training's own gradients."""
    calls = []
    add_to = Lookup.add_to
    monkeypatch.setattr(Lookup, "add_to", lambda *x: (calls.append(1), add_to(*x)))
    torch.manual_seed(0)
    first, ids = Tied().double(), IDS % 4 + 3  # many tokens alike
    few = trained(first, ids, next_token, equal(ids, Q=2, rows=1), training=training)
    assert not calls, "a few are looked up"
    many = equal(ids, Q=8, rows=1)
    run = assert_as_apart(first, ids, next_token, many, training=training)
    assert len(calls) == 3, "once a step"
    for a, b in zip(few.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["language", "vit"])
def test_more_directions_of_a_made_tensor_than_fit_at_once(name, monkeypatch):
    """Positions, a class token: tensors that are made of parameters alone."""
    first, data, loss = MODELS[name]()
    monkeypatch.setattr(contraction, "NODE_MEMORY", 3 * 4 * 5)
    assert_as_apart(first, data, loss, equal(data, Q=7, rows=1))


def test_a_parameter_that_validation_does_not_use_has_no_part_in_values():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            h = self.body(x).tanh()
            return self.a(h) + (self.b(h) if self.training else 0.0)

    assert_as_apart(Two(), (POINTS, LABELS), classes, unequal((POINTS, LABELS)))


def test_a_shared_pass_gives_the_values_of_clipped_gradients():
    first, data, loss = mlp()

    def loop(targets):
        model = copy.deepcopy(first)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with inrun.watch(
            model, opt, targets=targets, loss=loss, audit_every=0, max_norm=0.1
        ) as run:
            for step in range(4):
                with run.batch(range(6)):
                    loss(model, cut(data, 6 * step, 6)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
        return run.history()

    targets = unequal(data)
    got = loop(targets)
    for k, v in targets.items():
        one = loop({k: v})
        column = k if k in one else "value"
        assert np.allclose(got[k], one[column], rtol=1e-9), k


# Losses that are not means over rows


def summed(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum")


def contrastive(model, batch):
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def spread(model, batch):
    """A mean over rows and something of the whole batch."""
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + out.std()


@pytest.mark.parametrize("val_loss", [summed, contrastive, spread], ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [equal, unequal], ids=lambda f: f.__name__)
def test_a_loss_that_is_no_mean_over_rows_has_a_pass_per_target(val_loss, make):
    first, data, loss = mlp()
    if val_loss is spread and make is unequal:
        make = lambda d: {f"t{q}": [cut(d, 20 + 5 * q, n)] for q, n in enumerate((2, 4, 3))}  # noqa: E731
    assert_as_apart(first, data, loss, make(data), together=False, said=True, val_loss=val_loss)


def masked_mean(model, batch):
    ids, mask = batch
    losses = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def labelled(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("alike", [True, False])
def test_masked_means_prevent_a_shared_pass_where_their_masks_differ(kind, alike):
    first, data, loss = language()
    targets = {}
    for q in range(3):
        ids = cut(data, 20 + 2 * q, 2)
        mask = torch.ones(ids.shape, dtype=kind)
        mask[0, 3 if alike else q + 1 :] = 0
        targets[f"t{q}"] = [(ids, mask)]
    said = not alike and kind is torch.float64  # whole numbers are looked at before
    assert_as_apart(first, data, loss, targets, together=alike, said=said, val_loss=masked_mean)


@pytest.mark.parametrize("alike", [True, False])
def test_ignored_labels_prevent_a_shared_pass_where_their_numbers_differ(alike):
    first, data, loss = language()
    targets = {}
    for q in range(3):
        ids = cut(data, 20 + 2 * q, 2)
        labels = ids.clone()
        labels[0, 3 if alike else q + 1 :] = -100
        targets[f"t{q}"] = [(ids, labels)]
    assert_as_apart(first, data, loss, targets, together=alike, val_loss=labelled)


@pytest.mark.parametrize("alike", [True, False])
def test_ignored_labels_of_rows(alike):
    """One label per row, some of them ignored."""
    first, (x, y), loss = mlp()
    targets = {}
    for q in range(3):
        labels = y[20 + 4 * q : 24 + 4 * q].clone()
        labels[: 1 if alike else q + 1] = -100
        targets[f"t{q}"] = [(x[20 + 4 * q : 24 + 4 * q], labels)]
    assert_as_apart(first, (x, y), loss, targets, together=alike)


def test_masks_that_differ_from_the_second_step_on_are_noticed():
    """The first step verifies; what changes later must be seen too."""
    first, data, loss = language()
    targets = {}
    for q in range(3):
        batches = []
        for step in range(3):
            ids = cut(data, 20 + 6 * q + 2 * step, 2)
            labels = ids.clone()
            labels[0, 3 if step == 0 else 1 + q :] = -100
            batches.append((ids, labels))
        targets[f"t{q}"] = batches
    run = trained(first, data, loss, targets, val_loss=labelled)
    for name, batches in targets.items():
        one = trained(first, data, loss, {name: batches}, val_loss=labelled).history()
        column = name if name in one else "value"
        assert np.allclose(run.history()[name], one[column], rtol=1e-9, atol=1e-12), name


def test_labels_ignored_from_the_second_step_on_are_noticed():
    first, (x, y), loss = mlp()
    targets = {}
    for q in range(3):
        batches = []
        for step in range(3):
            at = slice(20 + 10 * q + 3 * step, 23 + 10 * q + 3 * step)
            labels = y[at].clone()
            if step:
                labels[:q] = -100
            batches.append((x[at], labels))
        targets[f"t{q}"] = batches
    run = trained(first, (x, y), loss, targets)
    for name, batches in targets.items():
        one = trained(first, (x, y), loss, {name: batches}).history()
        column = name if name in one else "value"
        assert np.allclose(run.history()[name], one[column], rtol=1e-9, atol=1e-12), name


def test_row_weights_that_differ_from_the_second_step_on_are_noticed():
    """A weighted mean: the joined loss is a mean only while the weights are alike."""

    def weighted(model, batch):
        x, y, w = batch
        return (F.cross_entropy(model(x), y, reduction="none") * w).sum() / w.sum()

    first, (x, y), loss = mlp()
    targets = {}
    for q in range(3):
        batches = []
        for step in range(3):
            at = slice(20 + 10 * q + 3 * step, 23 + 10 * q + 3 * step)
            w = torch.ones(3) if step == 0 else torch.rand(3) * (q + 1)
            batches.append((x[at], y[at], w))
        targets[f"t{q}"] = batches
    run = trained(first, (x, y), loss, targets, val_loss=weighted)
    for name, batches in targets.items():
        one = trained(first, (x, y), loss, {name: batches}, val_loss=weighted).history()
        column = name if name in one else "value"
        assert np.allclose(run.history()[name], one[column], rtol=1e-9, atol=1e-12), name


def test_a_loss_that_happens_to_be_the_mean_at_the_first_step():
    """Per-example gradients differ though the losses agree: a sum of equal parts over two."""

    def halves(model, batch):
        return summed(model, batch) / 2  # a mean for two rows

    first, data, loss = mlp()
    assert_as_apart(first, data, loss, equal(data, Q=2), together=False, said=True, val_loss=halves)


def test_batches_of_different_shapes_have_a_pass_each():
    first, data, loss = language()
    targets = {"short": [data[20:22, :3]], "long": [data[24:26]]}
    assert_as_apart(first, data, loss, targets, together=False)


def weighted(model, batch):
    return classes(model, (batch["x"], batch["y"])) * batch["weight"]


def test_batches_with_different_settings_have_a_pass_each():
    first, (x, y), train_loss = mlp()
    targets = {
        f"t{q}": [{"x": x[20 + q : 22 + q], "y": y[20 + q : 22 + q], "weight": 1.0 + q}]
        for q in range(2)
    }
    assert_as_apart(first, (x, y), train_loss, targets, together=False, val_loss=weighted)


def test_batches_with_different_zero_dimensional_tensors_have_a_pass_each():
    first, (x, y), train_loss = mlp()
    targets = {
        f"t{q}": [{"x": x[20 + q : 22 + q], "y": y[20 + q : 22 + q],
                   "weight": torch.tensor(1.0 + q)}]
        for q in range(2)
    }  # fmt: skip
    assert_as_apart(first, (x, y), train_loss, targets, together=False, val_loss=weighted)


def test_zero_dimensional_tensors_that_differ_later_are_noticed():
    first, (x, y), train_loss = mlp()
    targets = {
        f"t{q}": [{"x": x[20 + q : 22 + q], "y": y[20 + q : 22 + q],
                   "weight": torch.tensor(1.0 + q * step)} for step in range(3)]
        for q in range(2)
    }  # fmt: skip
    run = trained(first, (x, y), train_loss, targets, val_loss=weighted)
    for name, batches in targets.items():
        one = trained(first, (x, y), train_loss, {name: batches}, val_loss=weighted).history()
        column = name if name in one else "value"
        assert np.allclose(run.history()[name], one[column], rtol=1e-9, atol=1e-12), name


def test_a_validation_pass_that_cannot_be_followed_has_a_pass_per_target():
    class Mixing(nn.Module):
        """Rows meet in evaluation mode only, so training can be followed and validation not."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = self.a(x).tanh()
            if not self.training:
                n = len(h)
                return self.b((h.mT @ h).reshape(6, 6)).mean(0).expand(n, 3) + self.b(h)
            return self.b(h)

    data = POINTS, LABELS
    assert_as_apart(Mixing(), data, classes, equal(data), together=False, said=True)


def test_nothing_of_the_training_is_touched():
    """Many targets against none: weights, gradients, random states, buffers, modes."""

    def loop(watched, steps=3):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
        )
        model[1].eval()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = (POINTS, LABELS)
        run = inrun.watch(model, opt, targets=equal(data), loss=classes) if watched else None
        grads = []
        for step in range(steps):
            batch = cut(data, 6 * step, 6)
            if run is None:
                classes(model, batch).backward()
            else:
                with run.batch(range(6)):
                    classes(model, batch).backward()
            held = [(p.grad, p.grad.clone()) for p in model.parameters()]
            opt.step()
            for (g, copied), p in zip(held, model.parameters(), strict=True):
                assert p.grad is g and torch.equal(g, copied)
            grads += [c for _, c in held]
            opt.zero_grad()
        if run is not None:
            assert are_joined(run)
            run.close()
        states = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
        states += [torch.tensor(np.random.get_state()[1].astype(np.int64))]
        modes = [m.training for m in model.modules()]
        return [*model.state_dict().values(), *grads, *states], modes

    (plain, modes), (watched, same) = loop(False), loop(True)
    assert modes == same
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a, b)


def test_hooks_of_the_pass_are_gone():
    first, data, loss = language()
    run = trained(first, data, loss, equal(data))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
    assert all(p.requires_grad for p in run.model.parameters())


def test_batches_are_joined_where_types_and_shapes_fit():
    joining = Joining(0)

    def sizes(drawn):
        found = joining.join(drawn)
        return None if found is None else found[0]

    x = torch.zeros(2, 3)
    assert sizes([[x], [x, x]]) == [2, 4]
    assert sizes([[x]]) is None, "one target"
    assert sizes([[x], [x.float()]]) is None, "another type"
    assert sizes([[x], [torch.zeros(2, 4)]]) is None, "another width"
    assert sizes([[x, x[:1]], [x]]) is None, "a mean of means"
    assert sizes([[(x, x[:1])], [(x, x[:1])]]) is None, "which are the rows?"
    assert sizes([[(x, object)], [(x, object)]]) is None, "what may differ in them?"
    assert Joining(1).join([[x], [x]]) is None, "another dimension"
    both = joined([{"x": x, "n": 3}, {"x": x[:1], "n": 3}])
    assert both["x"].shape == (3, 3) and both["n"] == 3


def test_every_target_is_measured_once():
    """The others say nothing of a target: its rows may have other weights."""
    first, data, loss = mlp()
    calls = []

    def counted(model, batch):
        calls.append(len(batch[0]))
        return loss(model, batch)

    targets = {f"t{q}": [cut(data, q % 50, 1)] for q in range(70)}
    run = trained(first, data, loss, targets, steps=3, val_loss=counted)
    assert are_joined(run)
    assert calls.count(1) == 70 and calls.count(70) == 4, "then it is one pass for each step"
    one = trained(first, data, loss, {"t": targets["t37"]}, steps=3)
    assert np.allclose(run.history()["t37"], one.history()["value"], rtol=1e-9)
    with refused():
        run = trained(first, data, loss, targets, steps=1, val_loss=summed)
    assert not are_joined(run)


def test_values_are_contracted_in_full_precision_under_autocast(monkeypatch):
    """The passes are in bfloat16; sums over thousands of its products would lose all digits."""
    errors, contract = [], contraction.contract

    def compared(u, G, micros):
        found = contract(u, G, micros)
        expected = 0.0
        for node, records in micros[0].nodes(u.keys()):
            for r in records:
                d = u[node.name].full.double().flatten(1)
                expected = expected + d @ r.rows().double().flatten(1).T
        errors.append(float((found[0] - expected).norm() / expected.norm()))
        return found

    monkeypatch.setattr(sharded, "contract", compared)  # where the scorer gets it
    first, data, loss = mlp()

    def half(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, batch)

    first, data = first.float(), (data[0].float(), data[1])
    trained(first, data, half, equal(data, Q=6), val_loss=loss)
    assert errors and max(errors) < 1e-6


class Generated(nn.Module):
    """Positions made of constants that autocast made bfloat16, by a layer of float32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("at", torch.randn(6, 3))
        self.register_buffer("frequencies", torch.randn(3, 8))
        self.position, self.a, self.b = nn.Linear(8, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        made = self.position(torch.sin(self.at @ self.frequencies))
        return self.b(torch.tanh(self.a(x)[:, None] + made).mean(1))


@pytest.mark.parametrize("Q", [1, 2, 6])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_what_was_made_of_parameters_under_autocast(Q, max_norm):
    torch.manual_seed(0)
    model, x = Generated().float(), POINTS.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    targets = {f"t{q}": [(x[20 + q : 22 + q], LABELS[20 + q : 22 + q])] for q in range(Q)}
    options = {"loss": classes, "audit_every": 0, "max_norm": max_norm}
    with inrun.watch(model, optimizer, targets=targets, **options) as run:
        for rows in torch.arange(12).chunk(2):
            with run.batch(rows):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = classes(model, (x[rows], LABELS[rows]))
                loss.backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    assert len(run.history()) == 12


@pytest.mark.parametrize("sign", [torch.copysign, None], ids=["copysign", "sgn"])
def test_a_derivative_that_is_zero(sign):
    """A binarised head: it has the same gradient for every target, none."""

    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(V, 4)

        def forward(self, ids):
            w = self.table.weight
            return F.linear(
                self.table(ids), torch.sgn(w) if sign is None else sign(torch.ones_like(w), w)
            )

    torch.manual_seed(0)
    assert_as_apart(Binary(), IDS, next_token, equal(IDS, Q=6), optimizer=adamw)


def test_a_loss_that_is_not_finite_decides_nothing():
    first, data, loss = mlp()
    factor = iter([float("nan")] * 7 + [1.0] * 100)  # one joined, three alone, three passes

    def at_first(model, batch):
        return loss(model, batch) * next(factor)

    run = trained(first, data, loss, equal(data), val_loss=at_first)
    assert run.steps()["void"].notna().tolist() == [True, False, False]
    assert are_joined(run)


def test_estimators_at_one_point_share_the_gradients(monkeypatch):
    from inrun.validation import sweep

    formed = []
    real = sweep._gradient
    monkeypatch.setattr(sweep, "_gradient", lambda *a: formed.append(a[2]) or real(*a))
    first, data, loss = mlp()
    names = ["tangent", "sgd", "secant"]
    trained(first, data, loss, equal(data), steps=1, estimator=names)
    params = [k for k, _ in first.named_parameters()]
    measured = 3 * params  # each target once, to see that they can be joined
    assert sorted(formed) == sorted(measured + 2 * params), "at the weights and at the midpoint"


def test_lists_are_drawn_without_touching_random_states(monkeypatch):
    from inrun.validation import targets as module

    def never(self, *key):
        raise AssertionError("nothing random about a list")

    monkeypatch.setattr(module.Generators, "seeded", never)
    batches = module.Batches("t", [1, 2], 0)
    assert batches.take(5) == [1, 2, 1, 2, 1]
    assert batches.state_dict() == {"epoch": 2, "index": 1}


def test_tensors_made_of_parameters_are_differentiated_at_the_point():
    """Weight normalisation: the weight is made of two parameters, and not linear in them."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
            self.second = nn.Linear(6, 3)

        def forward(self, x):
            return self.second(self.first(x).tanh())

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    data = POINTS, LABELS
    assert_as_apart(Normed().double(), data, classes, equal(data), optimizer=sgd)
