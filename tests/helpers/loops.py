"""Language models that training loops are tried on, plain, checkpointed and with dropout."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.zoo import GPT


def next_token(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Checkpointed(GPT):
    """The same model with its layers recomputed in the backward pass."""

    reentrant = False

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.norm(x) @ self.embed.weight.t()


class Reentrant(Checkpointed):
    reentrant = True


class Dropped(GPT):
    """Dropout and BatchNorm: random numbers and buffers."""

    def __init__(self):
        super().__init__()
        self.drop, self.bn = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, ids):
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = self.drop(layer(x))
        x = self.bn(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x) @ self.embed.weight.t()


MODELS = {"gpt": GPT, "checkpointed": Checkpointed, "reentrant": Reentrant, "dropped": Dropped}
