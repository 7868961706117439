"""Operations on parameters of two modules that fully_shard gathers apart: right, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inrun
from helpers.ddp_cases import LENGTH, WORDS, Case, train
from helpers.ranks import in_ranks

# shapes of the two weights, and the operation on the batch and both
OPERATIONS = {
    "linear": ((6, 6), (6,), F.linear),
    "layer_norm": ((6,), (6,), lambda x, a, b: F.layer_norm(x, (6,), a, b)),
    "lerp": ((6,), (6,), lambda x, a, b: torch.lerp(a.expand_as(x), x, b)),
    "bilinear": ((6, 6, 6), (6,), lambda x, a, b: F.bilinear(x, x, a, b)),
    "einsum": ((6, 6), (6, 6), lambda x, a, b: torch.einsum("bi,ij,jk->bk", x, a, b)),
    "where": ((6,), (6,), lambda x, a, b: torch.where(x > 0, a, b)),
    "mul": ((6,), (6,), lambda x, a, b: x * (a * b)),
}
RIGHT = ("linear", "layer_norm", "lerp")


class Half(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(shape))

    def forward(self, x, function=None):
        x = x * self.scale
        return x if function is None else x + function(x, self.weight)


class Siblings(nn.Module):
    """The second module uses the first one's weight, which is still gathered."""

    def __init__(self, name):
        super().__init__()
        first, second, self.operation = OPERATIONS[name]
        self.first, self.second = Half(first), Half(second)
        self.head = nn.Linear(6, WORDS)

    def forward(self, ids):
        x = self.first(ids.to(self.head.weight.dtype) / WORDS)
        return self.head(self.second(x, lambda x, w: self.operation(x, self.first.weight, w)))


def apart(model):
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def together(model):
    mesh = init_device_mesh("cpu", (2,))
    fully_shard([model.first, model.second], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def case(name, shard):
    assert LENGTH == 6
    return Case(lambda: Siblings(name), shard=shard, watch={"estimator": "secant"})


def values(run):
    return run.history().set_index(["step", "id"])["value"]


def trained(rank, world):
    found = {}
    for name in OPERATIONS:
        if name not in RIGHT:
            with pytest.raises(inrun.CaptureError) as caught:
                train(case(name, apart), world, rank)
            found[name, "refused"] = str(caught.value)
        run, _ = train(case(name, apart if name in RIGHT else together), world, rank)
        found[name] = values(run)
    return found


def test_right_or_refused_with_the_way_out():
    first, second = in_ranks(2, trained)
    for name in OPERATIONS:
        alone, _ = train(case(name, None), 2, None)
        expected = values(alone)
        joined = {**first[name].to_dict(), **second[name].to_dict()}
        assert len(joined) == len(expected)
        assert max(abs(expected[k] - v) for k, v in joined.items()) < 1e-9 * expected.abs().max()
        if name not in RIGHT:
            for found in (first, second):
                said = found[name, "refused"]
                assert name in said and "first.weight, second.weight" in said
                assert "fully_shard([module_a, module_b])" in said
