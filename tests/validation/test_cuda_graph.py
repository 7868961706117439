"""What a recorded validation pass depends on, and that a replay is the pass."""

import contextlib
import copy
import enum
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.validation.cuda_graph import GraphCache, attributes, referred, trial_pass, twins
from inrun.validation.state import State
from inrun.validation.validator import model_loss

WEIGHT = 2.0
TABLE = torch.ones(3)
SETTINGS = {"weight": 1.0}


def plain(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def test_a_loss_that_refers_to_nothing_but_modules_and_functions():
    read = referred(plain)
    assert read is not None and read() == ()


def test_the_default_loss_can_be_recorded():
    read = referred(model_loss)
    assert read is not None and read() is not None


def test_a_number_in_the_closure_is_read_again():
    weight = 1.0

    def loss(model, batch):
        return weight * plain(model, batch)

    read = referred(loss)
    before = read()
    weight = 2.0
    assert 1.0 in before and 2.0 in read() and before != read()


def test_a_global_number_is_read_again(monkeypatch):
    def loss(model, batch):
        return WEIGHT * plain(model, batch)

    read = referred(loss)
    before = read()
    monkeypatch.setitem(globals(), "WEIGHT", 3.0)
    assert before == (2.0,) and read() == (3.0,)


def test_a_plain_value_that_becomes_a_tensor_is_not_taken_for_the_same():
    """Its numbers may change where it stands."""
    weight = 1.0

    def loss(model, batch):
        return weight * plain(model, batch)

    read = referred(loss)
    first = read()
    weight = torch.ones(1)
    before = read()
    weight.mul_(2)
    after = read()
    assert before is None or (hash(first) != hash(before) != hash(after))


def with_closure(held):
    def loss(model, batch):
        return held and plain(model, batch)

    return loss


class Weighted:
    weight = 1.0

    def loss(self, model, batch):
        return self.weight * plain(model, batch)

    def __call__(self, model, batch):
        return self.loss(model, batch)


@pytest.mark.parametrize(
    "held",
    [torch.ones(2), [1.0], {"a": 1}, Weighted(), (1, 2), {1}, torch.optim.SGD],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_mutable_objects_in_a_closure_prevent_recording(held):
    """Things whose inside may change unseen are not followed; a class is as fixed as a module."""
    assert (referred(with_closure(held)) is not None) == isinstance(held, type)


def test_modules_and_functions_in_the_closure_allow_recording():
    for held in (nn.Linear(2, 2), F.cross_entropy, torch.relu, F):
        assert referred(with_closure(held)) is not None


def test_global_tensors_and_dictionaries_prevent_recording():
    assert referred(lambda model, batch: plain(model, batch) * TABLE.sum()) is None
    assert referred(lambda model, batch: plain(model, batch) * SETTINGS["weight"]) is None


def test_defaults_allow_recording_unless_they_are_mutable():
    def loss(model, batch, weight=2.0, *, other=None):
        return weight * plain(model, batch)

    assert referred(loss)() == (2.0, None)

    def held(model, batch, weights=[1.0]):  # noqa: B006
        return weights[0] * plain(model, batch)

    assert referred(held) is None


def test_methods_partials_and_callable_objects_prevent_recording():
    assert referred(Weighted().loss) is None
    assert referred(Weighted()) is None
    assert referred(functools.partial(plain, batch=1)) is None
    assert referred(nn.CrossEntropyLoss()) is None


def test_settings_read_by_an_inner_function_prevent_recording():
    """The number is not in the loss's own names but in those of a function inside it."""

    def loss(model, batch):
        def scale(x):
            return x * SETTINGS["weight"]

        return scale(plain(model, batch))

    assert referred(loss) is None


def helper(x):
    return x * SETTINGS["weight"]


def test_a_function_that_the_loss_calls_and_that_refers_to_something():
    """A function is fixed, what it refers to is not."""

    def loss(model, batch):
        return helper(plain(model, batch))

    assert referred(loss) is None


def test_a_class_whose_attribute_is_read():
    """``Weighted.weight = 2`` is how many a script keeps its settings."""

    def loss(model, batch):
        return Weighted.weight * plain(model, batch)

    read = referred(loss)
    if read is not None:
        before = read()
        Weighted.weight = 5.0
        try:
            assert read() != before
        finally:
            Weighted.weight = 1.0


def test_an_empty_closure_cell_raises_nothing():
    def make():
        def loss(model, batch):
            return plain(model, batch) * late

        read = referred(loss)
        late = 1.0
        return read, late

    make()  # does not raise


def test_changed_attributes_of_modules_are_noticed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.flag, self.mode, self.size = 1.0, False, "a", (1, 2)
            self.inner = nn.Dropout(0.1)

    model = Scaled()
    modules = list(model.modules())
    first = attributes(modules)
    assert attributes(modules) == first
    for owner, name, value in (
        (model, "scale", 2.0),
        (model, "flag", True),
        (model, "mode", "b"),
        (model.inner, "p", 0.5),
        (model, "scale", None),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        assert attributes(modules) != first, name
        setattr(owner, name, before)
    assert attributes(modules) == first


def test_equal_attributes_of_different_types_are_told_apart():
    """1 and True, 0 and False, 1.0 are equal in Python but not to a model."""
    a, b = nn.Identity(), nn.Identity()
    a.x, b.x = 1, True
    assert attributes([a]) != attributes([b])


def test_swapped_attributes_are_noticed():
    a = nn.Identity()
    a.x, a.y = 1, 2
    before = attributes([a])
    a.x, a.y = 2, 1
    assert attributes([a]) != before


def test_changed_containers_of_a_module_are_noticed():
    a = nn.Identity()
    a.sizes = (1, 2)
    before = attributes([a])
    a.sizes = (1, 3)
    assert attributes([a]) != before


def test_tensors_of_a_module_are_never_read():
    """A fingerprint is taken in every step: it must not wait for the device, nor print weights."""

    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} of a tensor of the model")

    a = nn.Linear(2, 2)
    a.register_buffer("table", torch.zeros(3).as_subclass(Unreadable))
    a.kept = {"one": torch.zeros(3).as_subclass(Unreadable), "two": 2}
    before = attributes([a])
    a.kept["two"] = 3
    assert attributes([a]) != before


def test_attributes_with_equal_hashes_are_told_apart():
    class Mode(enum.Enum):
        A, B = 1, 2

    a = nn.Identity()
    for before, after in ((-1, -2), (Mode.A, Mode.B), ([Mode.A], [Mode.B])):
        a.x = before
        first = attributes([a])
        a.x = after
        assert attributes([a]) != first
    a.x = a.itself = [1]
    a.itself.append(a.itself)  # no end
    assert attributes([a]) is not None


def test_modules_with_hooks_are_not_recorded():
    a = nn.Linear(2, 2)
    handle = a.register_forward_hook(lambda module, args, out: None)
    assert attributes([a]) is None
    handle.remove()
    assert attributes([a]) is not None


class Once:
    """A batch counter: the loss is called in every step where nothing is recorded."""

    calls = 0


def test_on_a_cpu_every_pass_runs_the_loss():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def loss(m, batch):
        Once.calls += 1
        return plain(m, batch)

    Once.calls = 0
    with inrun.watch(
        model,
        optimizer,
        validation=[(X[:3], Y[:3])],
        loss=loss,
        audit_every=0,
        halves_every=0,
    ) as run:
        for _ in range(6):
            with run.batch(range(8)):
                plain(model, (X, Y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert Once.calls == 6 and len(run.steps()) == 6


def test_twins_take_the_place_of_parameters_for_a_while():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight  # tied
    model[0].bias.requires_grad_(False)  # not asked for
    weights, x = [model[0].weight], torch.randn(3, 4)
    alive = model(x).sum()  # keeps autograd's node of the weight
    expected = torch.autograd.grad(model(x).sum(), weights)
    with pytest.raises(KeyError), twins(list(model.modules()), weights) as own:
        assert model[0].weight is model[1].weight is own[0] is not weights[0]
        assert own[0].data_ptr() == weights[0].data_ptr()
        assert torch.equal(torch.autograd.grad(model(x).sum(), own)[0], expected[0])
        raise KeyError
    assert model[0].weight is model[1].weight is weights[0] and alive.requires_grad


def gradients(model, loss=plain):
    def compute(batch, weights):
        value = loss(model, batch)
        return value.detach(), torch.autograd.grad(value, weights, allow_unused=True)

    return compute


@pytest.fixture
def _as_if_on_a_gpu(monkeypatch):
    """What ``trial_pass`` asks of a device."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork([]))


@pytest.mark.usefixtures("_as_if_on_a_gpu")
def test_what_a_recording_would_get_wrong_is_not_recorded():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    modules, weights = list(model.modules()), list(model.parameters())
    batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
    expected = gradients(model)(batch, weights)
    loss, grads = trial_pass(gradients(model), batch, weights, modules)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))

    def elsewhere(m, batch, weight=model[0].weight):  # a weight that no twin replaces
        return plain(m, batch) + 1e-12 * weight.sum()

    def waits(m, batch):
        raise RuntimeError("called a synchronizing CUDA operation")

    def unprepared(m, batch):
        assert not torch.cuda.is_current_stream_capturing()
        return plain(m, batch)

    for other in (elsewhere, waits, unprepared):
        assert trial_pass(gradients(model, other), batch, weights, modules) is None

    def waits_unless_recorded(m, batch):
        return plain(m, batch) if torch.cuda.is_current_stream_capturing() else waits(m, batch)

    assert trial_pass(gradients(model, waits_unless_recorded), batch, weights, modules) is not None
    assert not torch.cuda.is_current_stream_capturing()
    handle = weights[0].register_hook(lambda g: 2 * g)
    assert trial_pass(gradients(model), batch, weights, modules) is None
    handle.remove()
    assert trial_pass(gradients(model), batch, weights, modules) is not None
    assert trial_pass(gradients(model), batch, [weights[0].detach()], modules) is None
    assert list(model.parameters()) == weights


class OnGPU(torch.Tensor):
    """Says that it is."""

    is_cuda = True


@pytest.mark.parametrize(
    ("trial", "losses", "recorded"),
    [
        (2.001, [2.0, 2.0, 2.0], True),
        (2.1, [2.0, 2.0, 2.0, 2.0], False),  # it does something else when it is recorded
        (None, [2.0, 2.0, 2.0, 2.0], False),
        (2.0, [2.0, 2.0, float("nan"), 2.0], True),  # which says nothing: tried again
    ],
)
def test_a_pass_is_recorded_once_its_trial_gives_the_same(trial, losses, recorded, monkeypatch):
    weights, batch = [torch.zeros(2).as_subclass(OnGPU)], torch.ones(1).as_subclass(OnGPU)
    left, replayed = iter(losses), torch.tensor(7.0)
    graph = SimpleNamespace(replay=lambda: None)
    recording = SimpleNamespace(inputs=[torch.zeros(1)], graph=graph, result=(replayed, []))
    found = None if trial is None else (torch.tensor(trial), [])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("inrun.validation.cuda_graph.trial_pass", lambda *args: found)
    monkeypatch.setattr(GraphCache, "_make", lambda self, *args: recording)
    graphs = GraphCache(plain)

    def compute(batch, weights):
        return torch.tensor(next(left)), [torch.ones(2)]

    for expected in losses:  # what a step gets is what the usual pass gives
        loss, _ = graphs.run(compute, batch, weights, [], None)
        torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
    assert graphs._refused == (not recorded)
    if recorded:
        assert graphs.run(compute, batch, weights, [], None)[0] is replayed


@pytest.mark.usefixtures("_as_if_on_a_gpu")
def test_a_trial_uses_up_no_random_numbers():
    model = nn.Linear(4, 3)
    weights, batch = list(model.parameters()), (torch.randn(5, 4), torch.randint(0, 3, (5,)))

    def noisy(m, batch):
        return plain(m, (batch[0] + torch.randn(5, 4), batch[1]))

    torch.manual_seed(0)
    first = trial_pass(gradients(model, noisy), batch, weights, [model])
    assert torch.equal(first[0], gradients(model, noisy)(batch, weights)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("estimator", ["secant", "sgd"])
@pytest.mark.parametrize("kind", ["usual", "waits", "elsewhere"])
def test_a_loop_may_hold_on_to_its_loss_while_a_pass_is_recorded(estimator, kind, monkeypatch):
    """Its graph keeps nodes alive that belong to another stream than the recording's."""

    def run_of(model, before):
        monkeypatch.setattr("inrun.validation.cuda_graph._BEFORE", before)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        X, Y = torch.randn(8, 4).cuda(), torch.randint(0, 3, (8,)).cuda()
        options = {"validation": [(X[:3], Y[:3])], "loss": val_loss, "audit_every": 0}
        with inrun.watch(model, optimizer, estimator=estimator, **options) as run:
            for _ in range(8):
                with run.batch(range(8)):
                    loss = plain(model, (X, Y))
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                F.dropout(X)  # random numbers after what may have failed
            made = len(run._steppers[0].scorer.validator._graphs._graphs)
        assert torch.isfinite(loss.detach()) and run.steps()["void"].isna().all()
        return torch.tensor(run.history()["value"].to_numpy()), made

    def val_loss(m, batch):
        loss = plain(m, batch)
        return loss if kind != "waits" else loss * max(1.0, loss.detach().item() * 0)

    stream, found = torch.cuda.current_stream(), []
    for before in (1000, 2):  # never recorded, and recorded
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 3)).cuda()
        if kind == "elsewhere":  # a weight that no twin replaces
            weight, forward = model[2].weight, model.forward
            model.forward = lambda x, f=forward, w=weight: (
                f(x) + F.linear(x[:, :1].expand(-1, 6), w)
            )
        found.append(run_of(model, before))
    assert [made for _, made in found] == [0, 1 if kind == "usual" else 0]
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()


class Scaled(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(3))

    def forward(self, x):
        return x * self.factor


BUFFER_CHANGES = {
    "buffer": lambda m: setattr(m, "factor", m.factor * 2),
    "buffer in place": lambda m: m.factor.mul_(2),
    "memory of a buffer": lambda m: setattr(m.factor, "data", m.factor.data * 2),
}


@pytest.mark.parametrize("change", BUFFER_CHANGES)
def test_a_buffer_elsewhere_in_memory_is_noticed(change):
    """A graph reads it where it was when the graph was made."""
    model = nn.Sequential(nn.Linear(4, 3), Scaled())
    state, found, held = State(plain), [], model[1].factor.data
    for _ in range(2):
        with state.kept(list(model.modules())):
            found.append(state.addresses())
        BUFFER_CHANGES[change](model[1])
    assert (found[0] == found[1]) is (change == "buffer in place")
    assert held is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "change",
    [
        "nothing", "dropout", "number", "shape", "weights", "buffer", "buffer in place",
        "memory of a buffer", "learning rate", "state",
    ],
)  # fmt: skip
def test_a_replay_gives_what_the_pass_gives(change):
    """The same run on a GPU, where passes are replayed, and on the CPU, where they are not."""
    weight = 1.0

    def loss(model, batch):
        return weight * plain(model, batch)

    histories = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        weight = 1.0
        model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 3), Scaled()).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        X, Y = torch.randn(8, 4).to(device), torch.randint(0, 3, (8,)).to(device)
        batches = [(X[:3], Y[:3])]
        if change == "shape":
            batches.append((X[3:8], Y[3:8]))
        with inrun.watch(model, optimizer, validation=batches, loss=loss, audit_every=0) as run:
            for step in range(10):
                if step == 6 and change == "number":
                    weight = 2.0
                if step == 6 and change == "dropout":
                    model[1].beta = 3.0
                if step == 6 and change == "weights":
                    for p in model.parameters():
                        p.data = p.data.clone() * 1.1
                if step == 6 and "buffer" in change:
                    BUFFER_CHANGES[change](model[3])
                if step == 6 and change == "learning rate":
                    optimizer.param_groups[0]["lr"] = 3e-2
                if step == 6 and change == "state":
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                with run.batch(range(8)):
                    plain(model, (X, Y)).backward()
                optimizer.step()
                optimizer.zero_grad()
        histories.append(torch.tensor(run.history()["value"].to_numpy()))
    assert torch.allclose(*histories, rtol=1e-7)
