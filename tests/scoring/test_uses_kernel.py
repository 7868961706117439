"""Uses of a whole model by kernels, against torch's operations; interpreted without a GPU."""

import json

import pytest
import torch
from torch import nn

from helpers.triton_script import errors_of, prepare

pytest.importorskip("triton", reason="needs Triton")

B, T = 3, 7


class Net(nn.Module):
    """Products and vectors of several sizes, with and without biases, some of them frozen; one
    weight is used twice."""

    def __init__(self, n, m):
        super().__init__()
        self.first, self.second = nn.Linear(n, m), nn.Linear(m, n, bias=False)
        self.third = nn.Parameter(torch.randn(n, m) / 4)  # as in transformers' Conv1D
        self.bias = nn.Parameter(torch.randn(m))
        self.norm, self.scale = nn.LayerNorm(m), nn.Parameter(torch.randn(n))
        self.root = nn.RMSNorm(n, eps=1e-3)
        self.frozen = nn.Linear(n, 1)
        self.frozen.bias.requires_grad = False

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        x = self.root(self.second(x)) * self.scale
        x = torch.addmm(self.bias, x.flatten(0, 1), self.third).view(*x.shape[:-1], -1)
        x = torch.tanh(self.second(x))  # again
        return self.frozen(x)


SIZES = {"odd": (5, 19), "even": (16, 48), "over a tile": (40, 150)}


def captured(n, m, rows=B):
    from inrun.capture.capture import Capture

    torch.manual_seed(0)
    model = Net(n, m).float()
    params = {k: p for k, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(rows, T, n, dtype=torch.float32)
    capture = Capture(model, params, form="ghost")
    with capture.batch(rows) as micro:
        model(x).pow(3).mean().backward()
    return params, micro


def directions(params, Q, with_K=True):
    from inrun.scoring.uses import Direction

    return {
        k: Direction(torch.randn(Q, *p.shape), torch.rand(p.shape) if with_K else None)
        for k, p in params.items()
    }


def both(u, G, micros, moving=None):
    """The contraction by kernels and without, and how many uses the kernels took."""
    from inrun import kernels
    from inrun.scoring import uses_kernel
    from inrun.scoring.contraction import contract

    taken, before, found = [], uses_kernel.AtOnce.add, []

    def add(self, total, batch):
        taken.append(len(self._arranged[batch].taken))
        return before(self, total, batch)

    uses_kernel.AtOnce.add = add
    uses_kernel._KERNEL.works.clear()
    for kernel in (True, True, False):  # compared with torch, then by the kernel alone, then torch
        kernels.reachable = lambda tensor, yes=kernel: yes
        found.append(contract(u, G, micros))
    kernels.reachable = lambda tensor: True
    uses_kernel.AtOnce.add = before
    used = all(uses_kernel._KERNEL.works.values()) and bool(uses_kernel._KERNEL.works)
    (_, _), (values, sums), (plain, plain_sums) = found
    return {
        "values": float((values - plain).abs().max() / plain.abs().max()),
        "sums": float((sums - plain_sums).abs().max() / plain_sums.abs().max()),
        "used": float(not used),
        "taken": taken[-1] if taken else 0,
    }


def other_types():
    """Weights in float32, activations in bfloat16: directions are written in both."""
    from inrun.scoring.laid import lay

    params, _ = captured(*SIZES["even"])
    u, G = directions(params, 2), {k: torch.randn(p.shape) for k, p in params.items()}
    wanted = [("first.weight", torch.bfloat16), ("first.weight", torch.float32),
              ("norm.weight", torch.float32), ("third", torch.bfloat16)]  # fmt: skip
    laid = lay(u, G, wanted)
    off = [0.0]
    for (name, dtype), at in laid.at.items():
        expected = u[name].full.flatten(1).to(dtype)
        found = laid.flat[dtype][:, at : at + expected.shape[1]]
        off.append(float(((found.double() - expected.double()) / expected.double()).abs().max()))
    sums = sum((u[k].full.double() * G[k].double()).flatten(1).sum(1) for k in u)
    return {"written": max(off), "sums": float((laid.sums - sums).abs().max() / sums.abs().max())}


def main():
    from inrun.scoring import uses_kernel

    prepare()
    found = {}
    for name, size in SIZES.items():
        params, micro = captured(*size)
        G = {k: p.grad for k, p in params.items()}
        for Q in (1, 3):
            found[f"{name}, {Q} targets"] = both(directions(params, Q), G, [micro])
    params, micro = captured(*SIZES["odd"])
    G = {k: p.grad for k, p in params.items()}
    found["without K"] = both(directions(params, 1, with_K=False), G, [micro])
    some = {
        k: d for k, d in directions(params, 1).items() if k not in ("first.weight", "norm.bias")
    }
    found["some parameters"] = both(some, G, [micro])
    uses_kernel.MEMORY = 1
    found["little memory"] = both(directions(params, 3), G, [micro])
    uses_kernel.MEMORY = 2**28
    found["two batches"] = both(directions(params, 1), G, [micro, captured(*SIZES["odd"], 2)[1]])
    found["one example"] = both(directions(params, 1), G, [captured(*SIZES["odd"], 1)[1]])
    found["other types"] = other_types()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def errors():
    return errors_of(__file__)


CASES = [f"{name}, {Q} targets" for name in SIZES for Q in (1, 3)] + [
    "without K", "some parameters", "little memory", "two batches", "one example",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kernels_contract_uses_as_torch_does(case, errors):
    found = errors[case]
    assert found["used"] == 0.0  # the kernel was found right and used
    assert found["values"] < 1e-5
    assert found["sums"] < 1e-5
    assert found["taken"] >= 6


def test_directions_are_written_in_every_wanted_type(errors):
    assert errors["other types"]["written"] < 2**-7  # the interpreter cuts bits off
    assert errors["other types"]["sums"] < 1e-6


if __name__ == "__main__":
    main()
