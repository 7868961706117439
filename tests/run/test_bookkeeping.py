"""Small questions that are asked in every step."""

import torch
from torch import nn

from inrun.run.coverage import modules_of
from inrun.tensors.autocast import as_it_was, current, no_autocast


def test_modules_come_in_their_order():
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared, nn.ReLU())
    model = nn.Sequential(inner, shared, nn.ModuleDict({"a": inner, "b": nn.Tanh()}))
    model.register_module("nothing", None)
    assert modules_of(model) == list(model.modules())


def test_autocast_is_asked_of_each_device():
    for device in ("cpu", "cuda", "mps"):
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            assert current(device)[1]
            with no_autocast(device):
                assert not torch.is_autocast_enabled(device)
        finally:
            torch.set_autocast_enabled(device, before)


def test_autocast_that_was_off_leaves_the_type_to_inner_blocks():
    for device in ("cpu", "cuda"):
        own = torch.get_autocast_dtype(device)
        with as_it_was(current(device)):
            assert torch.get_autocast_dtype(device) == own
