"""What watch refuses: the message names the real cause and the way out."""

import re
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import inrun

X, Y = torch.randn(12, 4), torch.randint(0, 3, (12,))


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def parts():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def watch(model, optimizer, **options):
    x = X.to(torch.get_default_dtype())
    return inrun.watch(model, optimizer, validation=[(x, Y)], loss=loss, **options)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_processes():
    """Two processes as far as anybody can tell; the other one is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def step(model, optimizer, run):
    x = X[:4].to(torch.get_default_dtype())
    with run.batch(range(4)):
        loss(model, (x, Y[:4])).backward()
    optimizer.step()


def test_ddp_around_a_part_of_the_model_is_refused(two_processes):
    model, optimizer = parts()
    ddp = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(TypeError, match="its part '0': DistributedDataParallel around a part"):
        watch(nn.Sequential(ddp), optimizer)


def test_ddp_that_leaves_parameters_out_is_refused(two_processes):
    model, optimizer = parts()
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]
    ddp = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"leaves out 0\.weight, so each rank trains a copy"):
        watch(ddp, optimizer)


def test_sync_batch_norm_is_refused_where_it_looks_at_other_ranks(two_processes):
    model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"its part '1': SyncBatchNorm .* Use GroupNorm"):
        watch(model, optimizer)  # (DDP takes it on a GPU only)
    model[1].eval()
    with watch(model, optimizer):
        pass


def test_sync_batch_norm_of_one_process_is_batch_norm():
    model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as run:
        step(model, optimizer, run)
        assert len(run.values()) == 4


def test_pipeline_stages_are_refused():
    stage = type("PipelineStage", (), {"__module__": "torch.distributed.pipelining.stage"})()
    with pytest.raises(TypeError, match="PipelineStage is pipeline parallelism: each process"):
        watch(stage, parts()[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import
def test_zero_redundancy_optimizer_is_refused(two_processes):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _ = parts()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with pytest.raises(TypeError, match=r"steps a part of the parameters on each rank.*AdamW"):
        watch(model, zero)


def test_ddp_of_one_process_is_watched(one_process):
    model, optimizer = parts()
    twin = parts()
    twin[0].load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model)
    tables = []
    for watched, its in ((ddp, optimizer), twin):
        with watch(watched, its) as run:
            step(watched, its, run)
            tables.append(run.values()["value"])
    torch.testing.assert_close(*(torch.tensor(t.to_numpy()) for t in tables))


def test_deepspeed_is_refused():
    model, optimizer = parts()
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    with pytest.raises(TypeError, match=r"DeepSpeed engine .*engine\.step\(\)"):
        watch(engine, optimizer)
    kind = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1"})
    zero = kind()
    zero.optimizer = optimizer
    with pytest.raises(TypeError, match="is DeepSpeed's"):
        watch(model, zero)


def test_accelerates_optimizer_is_taken_as_it_is():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())
    with watch(model, optimizer) as run:
        assert run.optimizer is optimizer.optimizer
        x = X[:4].double()
        with run.batch(range(4)):
            accelerator.backward(loss(model, (x, Y[:4])))
        optimizer.step()
        assert run.steps()["sum"].notna().all() and len(run.values()) == 4
    AcceleratorState._reset_state(reset_partial_state=True)  # it is the process's, not the test's
    GradientState._reset_state()


def test_a_wrapper_with_a_rule_of_its_own_is_watched():
    model, inner = parts()

    class Forwarding(torch.optim.SGD):
        optimizer = inner

    with watch(model, Forwarding(model.parameters(), lr=0.1)):
        pass


def test_a_scheduler_is_no_optimizer():
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(TypeError, match=r"ConstantLR around AdamW.*optimizer\.optimizer"):
        watch(model, scheduler)


def test_arguments_in_the_wrong_place_are_refused():
    model, optimizer = parts()
    for first, second, message in (
        (optimizer, model, "the optimizer first"),
        (model.forward, optimizer, "torch.nn.Module, not a method"),
        (model, model, "a module as the optimizer"),
        (model, model.parameters(), "not a generator"),
        (model, "adamw", "not a str"),
    ):
        with pytest.raises(TypeError, match=message):
            watch(first, second)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ([], "at least one"),
        (["secant", "secant"], "'secant' and 'secant' are the same"),
        (["secant", "secant+midpoint"], r"'secant' and 'secant\+midpoint' are the same"),
        (["sgd+current", "tangent", "sgd"], r"'sgd\+current' and 'sgd' are the same"),
        ("secant+", "no point after the plus"),
        ([None], "is a NoneType"),
        (["Secant"], "not known"),
    ],
)
def test_estimators_that_are_refused(estimator, message):
    with pytest.raises(ValueError, match=message):
        watch(*parts(), estimator=estimator)


def test_points_of_their_own_are_different_estimators():
    with pytest.raises(ValueError, match="are the same"):
        watch(*parts(), estimator=["secant", "secant+gauss2"], point="gauss2")
    with watch(*parts(), estimator=["secant", "secant+gauss2"]) as run:
        assert [e.point for e in run.estimators] == ["midpoint", "gauss2"]


def test_targets_that_are_no_dictionary_are_refused():
    with pytest.raises(inrun.ValidationError, match="name → validation data, not a list"):
        inrun.watch(*parts(), targets=[(X, Y)], loss=loss)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight
        self.blocks = nn.ModuleDict({"[a]": nn.Linear(4, 3)})

    def forward(self, x):
        return self.blocks["[a]"](self.head(self.body(x)))


def ignored(ignore):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, ignore=ignore) as run:
        table = run.coverage()
    return table.loc[table["status"] == "ignored", "parameter"].tolist()


def test_ignore_takes_names_and_patterns():
    assert ignored("body.*") == ["body.weight", "body.bias"]
    assert ignored(["*.bias"]) == ["body.bias", "blocks.[a].bias"]
    assert ignored(["blocks.[[]a].*", "body.bias"]) == [
        "body.bias", "blocks.[a].weight", "blocks.[a].bias"
    ]  # fmt: skip
    assert ignored(["blocks.[a].bias"]) == ["blocks.[a].bias"]  # a name is a name, brackets or not
    assert ignored([]) == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("boddy.weight", "Near names: body.weight"),
        ("body", "write 'body.*'"),
        ("head.weight", "head.weight is the same parameter as body.weight"),
        ("head.*", "head.weight is the same parameter as body.weight"),
        ("Body.*", "does not have: 'Body.*'"),
        ("*", "leaves no trainable parameter"),
    ],
)
def test_patterns_that_are_refused(pattern, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ignored([pattern])


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, graph):
        source, end = graph.edge_index
        h = self.nodes(graph.x)
        h = torch.zeros_like(h).index_add(0, end, h[source]).relu()
        return self.head(torch.zeros(graph.num_graphs, 5).index_add(0, graph.batch, h))


def graphs(*sizes):
    """A batch of graphs as torch_geometric makes it: all nodes in one table, and whose they are."""
    n, sizes = sum(sizes), torch.tensor(sizes)
    return types.SimpleNamespace(
        x=torch.randn(n, 4), edge_index=torch.randint(0, n, (2, 2 * n)), num_graphs=len(sizes),
        batch=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
    )  # fmt: skip


@pytest.mark.parametrize("labelled", [True, False])
def test_a_batch_of_graphs_without_owner_is_refused(labelled):
    model = GraphNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = inrun.watch(model, optimizer, validation=[graphs(2, 3)], loss=lambda m, g: m(g).sum())
    batch = graphs(3, 4, 5)
    labels = torch.tensor([0, 1, 2]) if labelled else None
    with (
        pytest.raises((inrun.BatchError, inrun.CaptureError)) as caught,
        run.batch(range(3)),
    ):
        out = model(batch)
        (F.cross_entropy(out, labels) if labelled else out.square().sum()).backward()
    message = str(caught.value)
    assert "nodes of a graph batch" in message and "run.batch(ids, owner=...)" in message
    assert "shape" in message
