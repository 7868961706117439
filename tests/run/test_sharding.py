"""Models under fully_shard: in one process as without it; what is refused, and how that is told."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import inrun

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(2))


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x.to(torch.get_default_dtype())), y)


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sharded(**options):
    model = plain()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def watch(model, optimizer, **options):
    return inrun.watch(model, optimizer, validation=[(X, Y)], loss=loss,
                       **{"estimator": "secant"} | options)  # fmt: skip


def train(model, **options):
    optimizer = adamw(model)
    with watch(model, optimizer, **options) as run:
        for step in range(3):
            rows = torch.arange(4 * step, 4 * step + 4)
            with run.batch(rows):
                loss(model, (X[rows], Y[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.history()["value"].to_numpy()


@pytest.mark.parametrize("training", ["bitwise", "fast"])
def test_one_process(training):
    one, two = train(plain(), training=training), train(sharded(), training=training)
    assert abs(one - two).max() < 1e-12 and abs(one).max() > 1e-4


def test_fsdp_is_as_before_after_a_run():
    def notes(model):
        found = []
        for module in (model, model[0]):
            state = module._get_fsdp_state()
            raw = state._fsdp_param_group
            own = raw.fsdp_params[0].sharded_param is next(module.parameters())
            found.append((sorted(vars(raw)), sorted(vars(state)), raw._sharded_state, own,
                          raw._training_state, list(raw._post_forward_indices), raw.reduce_grads,
                          len(raw.comm_ctx.post_forward_order),
                          len(module._forward_pre_hooks)))  # fmt: skip
        return found

    model = sharded()
    loss(model, (X[:2], Y[:2])).backward()  # what is made lazily is there
    model.zero_grad()
    before = notes(model)
    train(model)
    assert notes(model) == before


def muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])


class Part(nn.Module):
    """Only a part of it is sharded."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = sharded(), nn.Linear(3, 3)


class Spread(nn.Module):
    """As tensor parallelism leaves a parameter."""

    def __init__(self):
        super().__init__()
        own = distribute_tensor(torch.randn(3, 4), init_device_mesh("cpu", (1,)), [Replicate()])
        self.weight = nn.Parameter(own)


def with_(change):
    def make():
        model = sharded()
        change(model)
        return model

    return make


REFUSED = {
    "parameter outer.weight is trained and not under fully_shard": (Part, adamw, {}),
    "parameter weight is a DTensor that fully_shard did not make": (Spread, adamw, {}),
    "gradients are no mean over ranks": (
        with_(lambda m: m.set_gradient_divide_factor(3.0)), adamw, {}),
    "what the hook does to gradients is not known": (
        with_(lambda m: m.set_all_reduce_hook(lambda g: None)), adamw, {}),
    "would run in validation passes too": (
        with_(lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None)), adamw, {}),
    "Compile the blocks one by one": (with_(lambda m: m.compile()), adamw, {}),
    "torch.compile around the model": (lambda: torch.compile(sharded()), adamw, {}),
    "use bfloat16, which needs no loss scale": (
        lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)), adamw, {}),
    "Muon with fully_shard: its update needs whole parameters": (sharded, muon, {}),
    "a GradScaler with fully_shard": (
        sharded, adamw, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    make, optimizer, options = REFUSED[message]
    model = make()
    with pytest.raises(TypeError, match=message):
        watch(model, optimizer(model), **options)
