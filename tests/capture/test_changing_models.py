"""Models that do the same for some steps and then something else with rows of the same shapes.

The memo has seen their calls by then, and a plan of the forward pass is followed. What is known
must not be taken for what happens now: the per-example gradients are those of each example alone,
or the batch is refused as it is by a capture that sees the model for the first time, or it is void.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.captures import close, gradients_of
from inrun.capture import aside
from inrun.capture.capture import Capture
from inrun.errors import CaptureError

VOID = object()
B = T = D = 4  # all sizes alike: a dimension cannot be told from another by its size


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.change, self.changed = change, False
        self.double()

    def forward(self, x, feature):
        x = self.embed(x)
        x, feature = self.mixed(x, feature)
        for i, block in enumerate(self.blocks):
            if not (self.changed and self.change == "skipped" and i == 1):
                x = x + torch.tanh(self.norm(self.used(block, x)))
        return x

    def used(self, block, x):
        if self.changed and self.change == "other parameter":
            return F.linear(x, self.embed.weight, block.bias)
        return block(x)

    def mixed(self, x, feature):
        return CHANGES[self.change](self, x, feature) if self.changed else usual(self, x, feature)


def usual(m, x, feature):
    """All that a change replaces by something of the same shape."""
    return x.transpose(1, 2).roll(1, 1) + 0.5 * feature, feature


def rolled(m, x, f):
    return x.transpose(1, 2).roll(1, 0) + 0.5 * f, f


def transposed(m, x, f):  # B = T: the examples are in another dimension
    return x.transpose(0, 1).roll(1, 1) + 0.5 * f, f


def viewed(m, x, f):
    return x.reshape(T, B, D).roll(1, 1) + 0.5 * f.view(B, T, D), f


def features_moved(m, x, f):
    with torch.no_grad():
        f = f.flip(0)
    return usual(m, x, f)


def written_in_place(m, x, f):  # autograd does not see it
    x = x.transpose(1, 2).roll(1, 1) + 0.5 * f
    with torch.no_grad():
        x.copy_(x.flip(0))
    return x, f


def detached_rows(m, x, f):
    return x.transpose(1, 2).roll(1, 1) + x.detach().flip(0), f


def detached(m, x, f):
    return usual(m, x.detach().flip(0), f.flip(0))


CHANGES = {
    "flipped": lambda m, x, f: usual(m, x.flip(0), f.flip(0)),
    "indexed": lambda m, x, f: usual(m, x[m.order], f[m.order]),
    "selected": lambda m, x, f: usual(m, x.index_select(0, m.order), f.index_select(0, m.order)),
    "flipped alone": lambda m, x, f: usual(m, x.flip(0), f),
    "swapped": lambda m, x, f: usual(m, f, x),
    "rolled": rolled,
    "transposed": transposed,
    "viewed": viewed,
    "features moved": features_moved,
    "written in place": written_in_place,
    "detached rows": detached_rows,
    "detached": detached,
    "skipped": usual,
    "other parameter": usual,
}
UNSEEN = ("features moved", "detached rows")  # of numbers that have no gradient
ALONE = ("flipped", "indexed", "selected", "swapped", "detached", "skipped", "other parameter")


def inputs():
    return torch.randn(B, T, D).double(), torch.randn(B, T, D).double()


def watched(capture, model, x, feature):
    """Per-example gradients, or why there are none."""
    model.zero_grad()
    try:
        with capture.batch(B) as micro:
            model(x, feature).pow(3).sum().backward()
    except CaptureError as error:
        return str(error)
    return gradients_of(micro) if micro.void is None else VOID


def same(got, expected):
    if got is VOID:
        return True
    if isinstance(expected, str):
        return got == expected
    return got.keys() == expected.keys() and all(
        close(got[k], g, 1e-9) for k, g in expected.items()
    )


def new_capture(model, fast):
    capture = Capture(model, dict(model.named_parameters()), fast=fast)
    capture.inputs.claims.seen("feature", 1, 1)  # of two sizes: a row for each example
    capture.inputs.claims.seen("feature", B, B)
    return capture


@pytest.mark.parametrize("fast", [False, True], ids=["bitwise", "fast"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_known_is_not_taken_for_what_the_model_does_now(change, fast, monkeypatch):
    model = Model(change)
    capture = new_capture(model, fast)
    monkeypatch.setattr(aside, "_AGAIN", 9)
    for _ in range(6):
        x, feature = inputs()
        assert isinstance(watched(capture, model, x, feature), dict)
    assert capture.aside.followed == 1
    model.changed = True
    x, feature = inputs()
    first_seen = watched(new_capture(model, fast), model, x, feature)
    if change in UNSEEN:  # the gradient goes where it went; the mode sees it when it looks again
        while capture.aside.followed:
            watched(capture, model, x, feature)
    for _ in range(2):
        assert same(watched(capture, model, x, feature), first_seen)
    if change in ALONE:
        assert isinstance(first_seen, dict)
        for i in range(B):
            model.order = torch.tensor([0])
            model.zero_grad()
            model(x[i : i + 1], feature[i : i + 1]).pow(3).sum().backward()
            for k, p in model.named_parameters():
                expected = torch.zeros_like(p) if p.grad is None else p.grad
                if k in first_seen:
                    assert close(first_seen[k][i], expected, 1e-9), k
                else:
                    assert not expected.any(), k
    model.changed, model.order = False, torch.tensor([2, 0, 3, 1])
    again = watched(capture, model, x, feature)
    assert same(again, watched(new_capture(model, fast), model, x, feature))


def test_a_hook_of_the_users_that_moves_rows():
    model = Model("flipped")
    capture = new_capture(model, fast=False)
    for _ in range(6):
        watched(capture, model, *inputs())
    assert capture.aside.followed == 1
    hook = model.blocks[1].register_forward_hook(lambda m, args, out: out.flip(0))
    x, feature = inputs()
    expected = watched(new_capture(model, fast=False), model, x, feature)
    assert same(watched(capture, model, x, feature), expected)
    hook.remove()


class Normed(nn.Module):
    """Its normalisation is called by its own module, or with a factor that only the model knows."""

    def __init__(self, own):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.own, self.eps = own, 1e-5
        self.double()

    def forward(self, x, feature):
        x = torch.tanh(self.first(x) + feature)
        if self.own:
            return self.last(self.norm(x))
        return self.last(F.layer_norm(x, (D,), self.norm.weight, self.norm.bias, self.eps))


@pytest.mark.parametrize("own", [True, False], ids=["of the module", "of the model"])
def test_a_factor_that_the_graph_does_not_show(own):
    """The node of a layer norm does not say eps. It is run again along a direction."""
    model = Normed(own)
    capture, norm = new_capture(model, fast=False), model.norm
    for step in range(8):
        if step == 6:
            assert capture.aside.followed == 1
            model.eps = norm.eps = 0.1
        model.zero_grad()
        x, feature = inputs()
        with capture.batch(B) as micro:
            model(x, feature).pow(3).sum().backward()
        if step == 6 and not own:
            assert micro.void
            continue
        assert micro.void is None
        (use,) = (x for x in micro.uses if x.call.name == "layer_norm")
        u = {node: torch.randn(D).double() for node in use.nodes}
        found = use.dots(use.along(u)).sum()
        assert close(found, sum((u[n] * n.param.grad).sum() for n in u), 1e-9), step


def test_autocast_turned_on_and_off():
    """The same calls give tensors of another type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    capture = Capture(model, dict(model.named_parameters()))
    x = torch.randn(B, D)
    for on in (False, False, True, True, False):
        found = []
        for seen in (capture, Capture(model, dict(model.named_parameters()))):
            model.zero_grad()
            with seen.batch(B) as micro, torch.autocast("cpu", torch.bfloat16, enabled=on):
                (model(x) * 2).float().pow(2).sum().backward()
            found.append(gradients_of(micro))
        assert all(torch.equal(found[0][k], found[1][k]) for k in found[1])


def test_a_tensor_that_gets_another_shape_in_place():
    """Its shape is asked for in each call."""
    model = nn.Linear(D, D).double()
    capture = Capture(model, dict(model.named_parameters()))
    for shape in [(B, T * D), (B, T, D), (B, T * D), (B, T, D)]:
        x = torch.randn(B, T, D).double()
        with capture.batch(B) as micro:
            flat = torch.tanh(model(x).flatten(1))
            flat = flat * 2.0
            moved = flat.detach()
            moved.data = moved.data.view(shape)
            (flat.view(shape) * torch.tanh(moved)).sum().backward()
        rows = gradients_of(micro)["weight"]
        for i in range(B):
            model.zero_grad()
            y = torch.tanh(model(x[i : i + 1])) * 2.0
            (y * torch.tanh(y.detach())).sum().backward()
            assert close(rows[i], model.weight.grad, 1e-9)


@pytest.mark.parametrize("drawn", [False, True])
def test_constants_that_become_random(drawn):
    """A call on constants is cached; on random numbers of the same shape it is another call."""
    model = nn.Linear(D, D).double()
    capture = Capture(model, dict(model.named_parameters()))
    for step in range(3):
        x = torch.randn(B, D).double()
        with capture.batch(B) as micro:
            noise = torch.ones(D).double()
            if drawn and step == 2:
                noise = torch.rand(D).double()
            scaled = noise * 2.0
            assert bool(capture.provenance.drawn.get(scaled)) == (drawn and step == 2)
            (model(x) * scaled).pow(2).sum().backward()
        assert micro.records
