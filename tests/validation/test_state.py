"""What validation passes write is put back: watched training is the unwatched one, bit for bit."""

import copy
import functools
import random
import threading
import time
from collections import Counter as Counts
from collections import OrderedDict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.validation import state as state_module

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def state(self):
        """Everything beside parameters, to be compared."""
        return [v for k, v in vars(self).items() if k == "kept" or k.startswith("own")]

    def forward(self, x):
        return self.head(self.write(x))

    def write(self, x):
        return x


class Buffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def write(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x + self.mean


class ThroughData(Buffer):
    def write(self, x):
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return x + self.mean


class ThroughNumpy(Buffer):
    def write(self, x):
        self.mean.numpy()[:] = 0.9 * self.mean.numpy() + x.detach().numpy().mean(0)
        return x + self.mean


class Replaced(Buffer):
    def write(self, x):
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return x + self.mean


class OtherData(Buffer):
    def write(self, x):
        self.mean.data = 0.9 * self.mean + x.detach().mean(0)
        return x + self.mean


class Large(Plain):
    """More numbers than are copied at every step, written to through ``.data``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(2**15))

    def write(self, x):
        self.queue.data.add_(x.detach().mean())
        return x + self.queue[:5]


class Later(Buffer):
    """First written to when the copies of the first steps are long gone."""

    def write(self, x):
        if x[0, 0] > 5:
            self.mean.add_(1.0)
        return x + self.mean


class LaterLarge(Large):
    def write(self, x):
        if x[0, 0] > 5:
            self.queue.add_(1.0)
        return x + self.queue[:5]


class Registered(Plain):
    """A buffer that is None, and one that is not there, until they are written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("empty", None)

    def write(self, x):
        if x[0, 0] > 5:
            self.empty = torch.ones(5)
            self.register_buffer("new", torch.ones(5))
        return x if self.empty is None else x + self.empty + self.new


class Attributes(Plain):
    """Plain tensors: an attribute, in a list, a dictionary, a tuple, an object, a deque."""

    def __init__(self):
        super().__init__()
        self.own = torch.zeros(5)
        self.own_list, self.own_dict = [torch.zeros(5)], {"a": {"b": torch.zeros(5)}}
        self.own_tuple = (torch.zeros(5),)
        self.own_object = SimpleNamespace(mean=torch.zeros(5), calls=0)
        self.own_queue = deque([torch.zeros(5)], maxlen=3)
        self.own_array = np.zeros(5)

    def state(self):
        return [self.own, self.own_list, self.own_dict, self.own_tuple, vars(self.own_object),
                list(self.own_queue), self.own_array]  # fmt: skip

    def write(self, x):
        mean = x.detach().mean(0)
        self.own += mean
        self.own_list[0] += mean
        self.own_list.append(mean)
        self.own_dict["a"]["b"] = self.own_dict["a"]["b"] + mean
        self.own_tuple[0].data.add_(mean)
        self.own_object.mean, self.own_object.calls = mean, self.own_object.calls + 1
        self.own_queue.append(mean)
        self.own_array += mean.numpy()
        return x + self.own + sum(self.own_list) + self.own_object.mean


class Named(dict):
    pass


class Slotted:
    __slots__ = ("calls", "mean")


class OddAttributes(Plain):
    """Subclasses of containers, keys that change, slots, deep containers, a leaf of the graph."""

    def __init__(self):
        super().__init__()
        self.own_counts, self.own_named = Counts(), Named(mean=torch.zeros(5), calls=0)
        self.own_named.mean = torch.zeros(5)
        self.own_key, self.own_order = {0: "a"}, OrderedDict(a=1, b=2)
        self.own_deep = {"a": [{"b": ({"c": [torch.zeros(5)]},)}]}
        self.slotted = Slotted()
        self.slotted.calls, self.slotted.mean = 0, torch.zeros(5)
        self.leaf = torch.zeros(5, requires_grad=True)

    def state(self):
        slots = [self.slotted.calls, self.slotted.mean, self.leaf.detach(), self.own_named.mean]
        return [*super().state(), *slots]

    def write(self, x):
        mean = x.detach().mean(0)
        self.own_counts["calls"] += 1
        self.own_named["mean"] += mean
        self.own_named.mean += mean
        self.own_named["calls"] += 1
        key = next(iter(self.own_key))
        self.own_key[key + 1] = self.own_key.pop(key)
        self.own_order.move_to_end(next(iter(self.own_order)))
        self.own_deep["a"][0]["b"][0]["c"][0] += mean
        self.slotted.calls, self.slotted.mean = self.slotted.calls + 1, self.slotted.mean + mean
        with torch.no_grad():
            self.leaf += mean
        return x * (1 + 0.1 * self.own_counts["calls"] + key) + self.leaf.detach()


class Counter(Plain):
    def __init__(self):
        super().__init__()
        self.own_calls, self.own_sum = 0, 0.0

    def write(self, x):
        self.own_calls += 1
        self.own_sum += float(x.detach().sum())
        self.own_new = self.own_calls
        return x * (1 + 0.1 * self.own_calls)


class OwnGenerators(Plain):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.python, self.numpy = random.Random(4), np.random.default_rng(5)
        self.old = np.random.RandomState(6)

    def state(self):
        return [self.generator.get_state(), self.python.getstate()[1],
                str(self.numpy.bit_generator.state), self.old.get_state()[1]]  # fmt: skip

    def write(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        shift = self.python.random() + self.numpy.random() + self.old.rand()
        return x + 0.1 * noise + shift


class Normalised(Plain):
    """``F.batch_norm(training=True)`` in evaluation mode too, with tensors of its own."""

    def __init__(self):
        super().__init__()
        self.own_mean, self.own_var = torch.zeros(5), torch.ones(5)

    def write(self, x):
        return F.batch_norm(x, self.own_mean, self.own_var, training=True)


class FrozenTable(Plain):
    """A frozen table whose rows are shortened when they are looked up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 5, max_norm=0.5).requires_grad_(False)

    def write(self, x):
        return x + self.table((x[:, 0].abs() * 2).long().clamp(max=5))


class Hooked(Plain):
    """Hooks that collect what passes."""

    def __init__(self):
        super().__init__()
        kept = self.kept = []
        self.head.register_forward_hook(lambda m, args, out: kept.append(out.detach()))


MODELS = [
    Buffer, ThroughData, ThroughNumpy, Replaced, OtherData, Large, Later, LaterLarge, Registered,
    Attributes, OddAttributes, Counter, OwnGenerators, Normalised, FrozenTable, Hooked,
]  # fmt: skip


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(kind, watched, loss=loss_of, steps=5, Q=1, extra=list, **options):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    # the fourth batches are those that make "later" models write
    validation = [(X[30:36] + q + 10.0 * (t == 3), Y[30:36]) for q in range(Q) for t in range(4)]
    targets = {f"t{q}": validation[4 * q : 4 * q + 4] for q in range(Q)}
    options = {"estimator": ["secant", "sgd"], "audit_every": 1} | options
    run = inrun.watch(model, optimizer, targets=targets, loss=loss, **options) if watched else None
    found = []
    for t in range(steps):
        batch = X[6 * t : 6 * t + 6], Y[6 * t : 6 * t + 6]
        if run is None:
            loss_of(model, batch).backward()
        else:
            with run.batch(range(6)):
                loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(copy.deepcopy([list(model.state_dict().items()), model.state(), extra()]))
    if run is not None:
        run.close()
    return found, run, model


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b)
    elif isinstance(a, dict):
        assert_same(list(a.items()), list(b.items()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("kind", MODELS)
def test_the_training_never_sees_it(kind):
    (plain, _, model), (watched, run, other) = trained(kind, False), trained(kind, True)
    assert_same(plain, watched)
    assert list(vars(model)) == list(vars(other)) and list(model._buffers) == list(other._buffers)
    assert len(run.history()) == 30


@pytest.mark.parametrize("kind", MODELS)
def test_every_pass_starts_from_the_training_s_state(kind):
    """Else the values of a target would depend on which other targets there are."""
    _, run, _ = trained(kind, True, Q=2, chunk=6)  # chunk: each target has a pass of its own
    _, alone, _ = trained(kind, True, Q=1, chunk=6)
    assert np.array_equal(run.history()["t0"], alone.history().iloc[:, 2])


def test_large_tensors_are_not_copied_and_a_write_is_told(monkeypatch):
    monkeypatch.setattr(state_module, "_LARGEST", 1000)
    with pytest.warns(UserWarning, match="writes to a tensor of shape .32768,. .* Write to it onl"):
        trained(LaterLarge, True)


class Projected(Plain):
    def write(self, x):
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return x


def test_a_pass_that_writes_to_a_parameter_is_refused():
    with pytest.raises(inrun.ValidationError, match=r"writes to parameter 'head\.weight' in place"):
        trained(Projected, True, estimator="sgd", audit_every=0)


class Criterion:
    """A loss outside the model: a head in training mode, tensors, generators."""

    def __init__(self):
        torch.manual_seed(5)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(0)
        self.seen, self.center = (torch.zeros(3, dtype=torch.float64) for _ in range(2))

    def state(self):
        return [self.norm.state_dict(), self.generator.get_state(), self.seen, self.center]

    def __call__(self, model, batch):
        out = self.norm(model(batch[0]))
        self.seen.data.add_(out.detach().mean(0))
        self.center = 0.9 * self.center + out.detach().mean(0)
        noise = torch.randn(out.shape, generator=self.generator)
        return F.cross_entropy(out + noise - self.center, batch[1])

    def method(self, model, batch):
        return self(model, batch)


CRITERION, TABLE = Criterion(), torch.zeros(3, dtype=torch.float64)


def in_globals(model, batch):
    TABLE.add_(1.0)
    return CRITERION(model, batch) + TABLE.sum() * 0


@pytest.mark.parametrize("how", ["object", "method", "closure", "default", "partial", "global"])
def test_what_the_loss_reaches_outside_the_model(how):
    criterion = CRITERION if how == "global" else Criterion()

    def closure(model, batch):
        return criterion(model, batch)

    def default(model, batch, c=criterion):
        return c(model, batch)

    def bound(c, model, batch):
        return c(model, batch)

    losses = {"object": criterion, "method": criterion.method, "closure": closure,
              "default": default, "partial": functools.partial(bound, criterion),
              "global": in_globals}  # fmt: skip
    before = copy.deepcopy(criterion.state()), TABLE.clone()
    plain, _, _ = trained(Plain, False)
    watched, run, _ = trained(Plain, True, loss=losses[how])
    assert_same(plain, watched)
    assert_same(before, (criterion.state(), TABLE))
    assert criterion.norm.training and len(run.history()) == 30


def test_a_tensor_in_the_closure_that_the_loss_binds_anew():
    mean = torch.zeros(3)

    def loss(model, batch):
        nonlocal mean
        out = model(batch[0])
        mean = 0.9 * mean + out.detach().mean(0)
        return F.cross_entropy(out - mean, batch[1])

    before = mean
    trained(Plain, True, loss=loss)
    assert mean is before and not mean.any()


def numbers():
    return [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]


def test_global_generators_that_the_loss_draws_from():
    def drawing(model, batch):
        shift = random.random() + np.random.rand() + float(torch.rand(()))
        return F.cross_entropy(model(batch[0] + shift), batch[1])

    def loop(watched):
        random.seed(0), np.random.seed(0)
        return trained(Plain, watched, loss=drawing, extra=numbers)[0]

    assert_same(loop(False), loop(True))


class Prefetching(threading.Thread):
    """Draws from the global generators while a pass runs, as an augmenting thread does."""

    def __init__(self):
        super().__init__(daemon=True)
        self.drawn, self.turn, self.done, self.over = [], *(threading.Event() for _ in range(2)), 0

    def run(self):
        while True:
            self.turn.wait()
            self.turn.clear()
            if self.over:
                return
            self.drawn.append((random.random(), float(np.random.rand())))
            self.done.set()

    def draw(self):
        self.done.clear()
        self.turn.set()
        assert self.done.wait(10)


@pytest.mark.parametrize("known", ["before", "at first", "never"])
def test_a_thread_that_draws_while_a_pass_runs_draws_each_number_once(known):
    """``known``: when a pass ran in which the thread drew nothing."""
    random.seed(0), np.random.seed(0)
    expected = [(random.random(), float(np.random.rand())) for _ in range(20)]
    random.seed(0), np.random.seed(0)
    thread, begun = Prefetching(), []

    def loss(model, batch):
        if thread.is_alive():
            begun.append(True)
            if known != "at first" or len(begun) > 1:
                thread.draw()
        return loss_of(model, batch)

    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = list(zip(X[30:36], Y[30:36], strict=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    said = pytest.warns(UserWarning, match="drawn from while inrun ran the validation pass")
    with (
        said if known == "never" else nullcontext(),
        inrun.watch(
            model, optimizer, validation=loader, loss=loss, audit_every=0, per_step=1
        ) as run,
    ):
        for t in range(6):
            if t == (known == "before"):
                thread.start()
            with run.batch(range(6)):
                loss_of(model, (X[:6], Y[:6])).backward()
            optimizer.step()
            optimizer.zero_grad()
    thread.over = 1
    thread.turn.set()
    thread.join()
    assert len(thread.drawn) >= 5 and thread.drawn == expected[: len(thread.drawn)]


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clocks of threads here")
def test_a_thread_that_waits_is_no_reason_not_to_set_back():
    """A progress bar's, say."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()

    def drawing(model, batch):
        return F.cross_entropy(model(batch[0] + random.random() + np.random.rand()), batch[1])

    try:
        random.seed(0), np.random.seed(0)
        time.sleep(0.01)  # until it waits
        before = numbers()
        trained(Plain, True, loss=drawing, steps=2)
        assert_same(before[:2], numbers()[:2])
    finally:
        stop.set()
        thread.join()
