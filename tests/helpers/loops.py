"""Language models that training loops are tried on, plain, checkpointed and with dropout."""

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
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.logits(x)


class Reentrant(Checkpointed):
    reentrant = True


class Dropped(GPT):
    """Dropout and BatchNorm: random numbers and buffers."""

    def __init__(self):
        super().__init__()
        self.drop, self.bn = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, ids):
        x = self.drop(self.token(ids))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.logits(self.bn(x.transpose(1, 2)).transpose(1, 2))


MODELS = {"gpt": GPT, "checkpointed": Checkpointed, "reentrant": Reentrant, "dropped": Dropped}
