"""Models made of a function and a few layers, and a watched run of one."""

import torch
from torch import nn

import inrun


class Model(nn.Module):
    """Some layers and parameters, and a function of them and the input."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, tuple):
                part = nn.Parameter(torch.randn(part))
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def watched(model, loss, x, optimizer=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=[x], loss=loss, audit_every=1, **options)
    return run, optimizer


def square(model, x):
    return model(x).pow(2).mean()
