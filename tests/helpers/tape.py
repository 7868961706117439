"""A recorder for CPUs: repeats the operations of a pass on its memory, as a CUDA graph does."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import inrun.gpt


class Dropped(inrun.gpt.GPT):
    """Dropout and BatchNorm: random numbers and buffers."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.drop, self.bn = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def logits(self, x):
        return super().logits(self.drop(self.bn(x.transpose(1, 2)).transpose(1, 2)))


def storages(tree):
    return {
        x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)
    }


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = (args, kwargs or {})
        fresh = storages(out).isdisjoint(storages(given))
        if fresh or func._schema.is_mutable:  # not a view
            self.steps.append((func, given, out if fresh else None))
        return out

    @torch.no_grad()
    def replay(self):
        for func, (args, kwargs), out in self.steps:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: x.data, (args, kwargs))
            new = func(*args, **kwargs)  # on .data: versions stay, as when kernels run alone
            if out is not None:
                for mine, x in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(mine, torch.Tensor):
                        mine.data.copy_(x)


class TapeRecorder:
    """Counts what it is asked for; ``fails`` names the part that raises, ``skips(func)`` says which
    operations a replay leaves out: a recorder that is wrong."""

    exact = True

    def __init__(self, fails=None):
        self.device, self.fails, self.skips = torch.device("cpu"), fails, lambda func: False
        self.trials = self.recordings = self.settled = 0

    @contextmanager
    def tried(self):
        self.trials += 1
        if self.fails == "trial":
            raise RuntimeError("called a synchronizing CUDA operation")
        yield

    def record(self, run):
        self.recordings += 1
        if self.fails == "recording" or (self.fails == "backward" and self.recordings == 2):
            raise RuntimeError("operation not permitted when stream is capturing")
        tape = Tape()
        with tape:
            found = run()
        tape.steps = [step for step in tape.steps if not self.skips(step[0])]
        return found, tape.replay

    def settle(self):
        self.settled += 1
