"""A kept walk over the model and the loss is given up when anything on its way changes."""

import functools
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

from inrun.validation.identity import Trail
from inrun.validation.reach import Reached

OUTER = 1.0


class Settings:
    __slots__ = ("held",)

    def __init__(self):
        self.held = 1.0


class Config:
    def __init__(self):
        self.rate, self.nested = 0.1, {"a": [1, 2]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(2, 2), nn.Conv1d(2, 2, 1)
        self.conv.notes = ([],)
        self.register_buffer("mask", torch.ones(2))
        self.flag, self.empty, self.numbers, self.names = True, [], [1.0, [2.0]], {"a"}
        self.table, self.ordered = {"x": 1}, OrderedDict(a=1, b=2)
        self.queue, self.config, self.slots = deque([1, 2]), Config(), Settings()
        self.cache = torch.zeros(3)


def setup():
    model = Model()
    inner, state = [1.0], {"weight": 2.0}

    def loss(m, batch, factor=3.0, *, power=1.0):
        return m(batch) * inner[0] * state["weight"] * factor * power * OUTER

    return model, loss, inner, state


def rename(space, old, new):
    space[new] = space.pop(old)


CHANGES = {
    "attribute": lambda m, *_: setattr(m, "flag", False),
    "new attribute": lambda m, *_: setattr(m, "other", 1),
    "deleted attribute": lambda m, *_: delattr(m, "flag"),
    "renamed attribute": lambda m, *_: rename(vars(m), "cache", "cash"),
    "attribute of a stateless layer": lambda m, *_: setattr(m.linear, "in_features", 7),
    "list of a stateless layer": lambda m, *_: m.conv.notes[0].append(1),
    "forward of a stateless layer": lambda m, *_: setattr(m.linear, "forward", print),
    "mode": lambda m, *_: m.linear.eval(),
    "empty list": lambda m, *_: m.empty.append(1),
    "list": lambda m, *_: m.numbers.__setitem__(0, 5.0),
    "list in a list": lambda m, *_: m.numbers[1].append(5.0),
    "set": lambda m, *_: m.names.add("b"),
    "dict": lambda m, *_: m.table.update(x=2),
    "ordered": lambda m, *_: m.ordered.move_to_end("a"),
    "queue": lambda m, *_: m.queue.append(3),
    "object": lambda m, *_: setattr(m.config, "rate", 0.2),
    "list in an object": lambda m, *_: m.config.nested["a"].append(3),
    "slot": lambda m, *_: setattr(m.slots, "held", 2.0),
    "buffer": lambda m, *_: setattr(m, "mask", torch.ones(2)),
    "parameter": lambda m, *_: setattr(m.linear, "bias", nn.Parameter(torch.ones(2))),
    "layer": lambda m, *_: setattr(m, "linear", nn.Linear(2, 2)),
    "tensor": lambda m, *_: setattr(m, "cache", torch.zeros(3)),
    "tensor that requires a gradient": lambda m, *_: m.cache.requires_grad_(),
    "hook": lambda m, *_: m.linear.register_forward_hook(print),
    "hook before": lambda m, *_: m.register_forward_pre_hook(print),
    "list of the loss": lambda m, loss, inner, state: inner.append(1.0),
    "dict of the loss": lambda m, loss, inner, state: state.update(weight=3.0),
    "cell": lambda m, loss, *_: setattr(loss.__closure__[0], "cell_contents", [1.0]),
    "default": lambda m, loss, *_: setattr(loss, "__defaults__", (4.0,)),
    "keyword default": lambda m, loss, *_: loss.__kwdefaults__.update(power=2.0),
    "global": lambda *_: globals().update(OUTER=float("2.5")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name, monkeypatch):
    monkeypatch.setitem(globals(), "OUTER", 1.0)
    model, loss, inner, state = setup()
    reached = Reached(list(model.modules()), loss)
    assert reached.unchanged(list(model.modules())) and reached.untouched()
    with torch.no_grad():  # numbers in tensors are no change
        model.linear.weight.mul_(2.0)
        model.mask.add_(1.0)
    assert reached.unchanged(list(model.modules()))
    CHANGES[name](model, loss, inner, state)
    assert not reached.unchanged(list(model.modules()))


BARE = {
    "hook": lambda linear: linear.register_forward_hook(print),
    "hook before": lambda linear: linear.register_forward_pre_hook(print),
    "hook of the backward pass": lambda linear: linear.register_full_backward_hook(print),
    "hooks replaced": lambda linear: setattr(linear, "_forward_hooks", {1: print}),
    "buffer": lambda linear: linear.register_buffer("mask", torch.ones(2)),
    "buffers replaced": lambda linear: setattr(linear, "_buffers", {"mask": torch.ones(2)}),
    "forward": lambda linear: setattr(linear, "forward", print),
    "parameter": lambda linear: setattr(linear, "bias", nn.Parameter(torch.ones(2))),
    "another parameter": lambda linear: linear.register_parameter("more", nn.Parameter(OTHER)),
    "no parameter": lambda linear: setattr(linear, "bias", None),
    "an old module": lambda linear: vars(linear).pop("_forward_hooks"),
}
OTHER = torch.ones(2)


@pytest.mark.parametrize("name", BARE)
def test_a_quick_look_notices_what_makes_a_stateless_layer_another(name):
    model, loss, *_ = setup()
    reached = Reached(list(model.modules()), loss)
    model.linear.in_features, model.linear.note = 7, [1.0]  # no pass can change these
    assert reached.unchanged(list(model.modules()), thorough=False)
    assert not reached.unchanged(list(model.modules()))
    BARE[name](model.linear)
    assert not reached.unchanged(list(model.modules()), thorough=False)


def test_other_modules_and_keywords_of_a_partial():
    model, loss, *_ = setup()
    bound = functools.partial(loss, factor=2.0)
    reached = Reached(list(model.modules()), bound)
    assert not reached.unchanged(list(model.modules())[:-1])
    bound.keywords["factor"] = 3.0
    assert not reached.untouched()


def test_what_is_never_put_back_is_looked_at_between_steps_alone():
    """An attribute of a layer whose forward pass writes to nothing: not put back after a pass, but
    the next step walks again."""
    model, loss, *_ = setup()
    reached = Reached(list(model.modules()), loss)
    model.linear.mine = [1.0]
    assert reached.untouched() and not reached.unchanged(list(model.modules()))


def test_an_entry_that_moves_to_the_next_dictionary():
    a, b, trail = {"x": 1, "y": 2}, {"z": 3}, Trail()
    for space in (a, b):
        trail.container(space)
    trail.note()
    assert trail.unchanged()
    rest = dict(b)
    b.clear()
    b["y"] = a.pop("y")
    b.update(rest)
    assert not trail.unchanged()


def test_tensors_that_are_keys_are_not_compared_by_their_numbers():
    table, trail = {torch.ones(2): 1}, Trail()
    trail.container(table)
    trail.note()
    assert trail.unchanged()
    table.clear()
    table[torch.ones(2)] = 1
    assert not trail.unchanged()


def test_a_walk_that_would_keep_a_graph_alive_does_not_last():
    model, loss, *_ = setup()
    assert Reached(list(model.modules()), loss).lasting
    model.cache = model.linear(torch.ones(2))
    assert not Reached(list(model.modules()), loss).lasting
