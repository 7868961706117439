"""Compiled models give the values of eager ones, keep their graphs, and say when they cannot."""

import copy
import functools
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import inrun
from helpers.inside import are_joined, fell_back
from helpers.zoo import GPT, ZOO, V

DATA = torch.randint(0, V, (40, 5), generator=torch.Generator().manual_seed(1))
VALIDATION = torch.randint(0, V, (3, 5), generator=torch.Generator().manual_seed(2))
pytestmark = pytest.mark.filterwarnings(  # torch.compile asks for .grad of what enters a graph
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)
SMALL = ["mlp", "convnet-groupnorm", "convnet-batchnorm", "encoder", "encoder-sequence-first",
         "vit", "gpt"]  # fmt: skip
LARGE = ["gpt2", "llama", "bert", "t5"]  # the other models of the zoo are made of the same parts
FALLS_BACK = {  # why the graph runs eagerly
    "bert": "mixes parameters with 'token_type_ids'",  # cut out of a buffer inside the graph
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def eager(model):
    return torch.compile(model, backend="eager")


def next_token(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rows_of(step, n=6):
    return (torch.arange(n) + 6 * step) % len(DATA)


def steps_of(model, optimizer, run, n=4, loss=next_token, rows=rows_of):
    for step in range(n):
        with run.batch(ids := rows(step)):
            loss(model, DATA[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model, n=4, call=None, loss=next_token, rows=rows_of, val_loss=next_token, **options):
    """The run of a short training. ``call``: what the loop calls instead of the model."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
    options = {"validation": [VALIDATION], "loss": val_loss, "audit_every": 0,
               "training": "fast"} | options  # fmt: skip
    with inrun.watch(model, optimizer, **options) as run:
        steps_of(model if call is None else call, optimizer, run, n, loss, rows)
    return run


def assert_same(one, other, rtol=1e-9):
    """The values of two runs, step by step, and what they cover."""
    for target in one.targets:
        a, b = one.history(), other.history()
        column = "value" if target == "validation" else target
        assert a["step"].tolist() == b["step"].tolist(), "no step is void"
        scale = a[column].abs().max()
        assert np.allclose(a[column], b[column], rtol=rtol, atol=rtol * scale), target
    one, other = (run.coverage().drop(columns="forms") for run in (one, other))
    assert one.equals(other)  # what is remembered in eager mode leaves a graph as records


def assert_compiled(run):
    assert not fell_back(run)


def both(first, compile=eager, n=4, **options):
    """The runs of a model and of its compiled copy."""
    plain = trained(copy.deepcopy(first), n, **options)
    return plain, trained(compile(copy.deepcopy(first)), n, **options)


# The zoo


def zoo_run(problem, model, **options):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)

    def loss(m, batch):
        return problem.loss(problem.forward(m, batch), batch)

    options = {"audit_every": 0, "training": "fast", "batch_dim": problem.batch_dim} | options
    with inrun.watch(model, optimizer, validation=[problem.batch], loss=loss, **options) as run:
        for _ in range(3):
            with run.batch(range(problem.B)):
                loss(model, problem.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


@pytest.mark.parametrize("form", ["auto", "ghost", "materialise"])
@pytest.mark.parametrize("name", SMALL)
def test_compiled_models_of_the_zoo_have_the_values_of_eager_ones(name, form):
    problem = ZOO[name]()
    plain = zoo_run(problem, copy.deepcopy(problem.model), form=form)
    compiled = zoo_run(problem, eager(problem.model), form=form)
    assert_same(plain, compiled)
    assert_compiled(compiled)


@pytest.mark.parametrize("name", LARGE)
def test_large_compiled_models_of_the_zoo_have_the_values_of_eager_ones(name):
    problem = ZOO[name]()
    plain = zoo_run(problem, copy.deepcopy(problem.model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = zoo_run(problem, eager(problem.model))
    said = [str(w.message) for w in said if "inrun" in str(w.message) or "step" in str(w.message)]
    assert_same(plain, compiled)
    if name in FALLS_BACK:
        assert fell_back(compiled) and len(said) == 1 and FALLS_BACK[name] in said[0]
    else:
        assert_compiled(compiled)
        assert not said


@pytest.mark.parametrize("name", ["mlp", "convnet-batchnorm", "gpt"])
def test_values_are_right_through_autograds_compiler(name):
    problem = ZOO[name]()
    plain = zoo_run(problem, copy.deepcopy(problem.model))
    compiled = zoo_run(problem, torch.compile(problem.model, backend="aot_eager"))
    assert_same(plain, compiled)
    assert_compiled(compiled)


# inductor compiles C++ for minutes on a busy machine: once here, the rest in the long suite
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@COMPILER
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_are_right_with_inductor(large):
    plain, compiled = both(GPT(layers=1) if large else Small(), torch.compile)
    assert_same(plain, compiled, 1e-8)
    assert_compiled(compiled)


def test_bitwise_training_is_the_same_up_to_rounding():
    first = GPT()
    models = copy.deepcopy(first), eager(copy.deepcopy(first))
    runs = [trained(m, training="bitwise") for m in models]
    assert_same(*runs)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)


# What is compiled, and when


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, V)

    def forward(self, x):
        return self.linear(x.relu())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 4), Head()

    def forward(self, ids):
        return self.head(self.embed(ids))


INDUCTOR = pytest.param(torch.compile, marks=[pytest.mark.slow, COMPILER])


class WithLoss(Small):
    def forward(self, ids):
        return F.cross_entropy(super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Viewed(Small):
    def forward(self, ids):
        logits = super().forward(ids)
        rows = logits.view(len(ids), -1).view(logits.shape)  # only where there are no gaps
        return F.cross_entropy(rows[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Squeezed(Small):
    def forward(self, ids):
        return super().forward(ids).unsqueeze(0).squeeze(0)


@pytest.mark.parametrize("compile", [eager, INDUCTOR], ids=["eager", "inductor"])
@pytest.mark.parametrize("form", ["ghost", "materialise"])
@pytest.mark.parametrize("training", ["fast", "bitwise"])
@pytest.mark.parametrize("kind", [WithLoss, Viewed, Small, Squeezed])
def test_a_vocabulary_is_padded_where_nobody_sees_it(compile, form, training, kind, monkeypatch):
    from inrun.capture.compiled import planner

    longer = []

    def padded(input, weight, bias=None, *, missing):
        longer.append(missing)
        return planner_padded(input, weight, bias, missing=missing)

    planner_padded = planner.padded
    monkeypatch.setattr(planner, "padded", padded)
    monkeypatch.setattr(planner, "short_by", lambda n, *_: -n % 8)  # as on a GPU, in bfloat16
    own_loss = {"loss": (lambda m, ids: m(ids)), "val_loss": (lambda m, ids: m(ids))}
    options = own_loss if kind in (WithLoss, Viewed) else {}
    plain, compiled = both(kind(), compile, form=form, training=training, **options)
    assert_same(plain, compiled, 1e-8)
    assert_compiled(compiled)
    assert set(longer) == ({-V % 8} if kind is WithLoss else set())


def test_gradients_of_an_example_with_gaps_are_made_contiguous():
    """The kernels read the gradient of an example number after number."""
    from inrun.capture.compiled.planner import _dense

    whole = torch.randn(3, 8, 16)
    assert _dense(whole).grads is whole
    between = whole[:, :5]
    assert _dense(between).grads is between
    inside = whole[:, :, :5]
    assert _dense(inside).grads.is_contiguous() and torch.equal(_dense(inside).grads, inside)


@pytest.mark.parametrize("how", ["before", "after", "in place", "function", "submodule"])
def test_graphs_go_to_the_backend_the_user_chose(how):
    """Another one may not even be there: inductor needs a compiler."""
    seen = []

    def own(gm, inputs):
        seen.append(gm)
        return gm.forward

    model = Small()
    compiled = model
    if how in ("before", "after"):
        compiled = torch.compile(model, backend=own)
    elif how == "in place":
        model.compile(backend=own)
    elif how == "submodule":
        model.head.compile(backend=own)
    watched = compiled if how == "before" else model
    step = torch.compile(next_token, backend=own) if how == "function" else next_token

    def loss(m, ids):
        seen.clear()
        return step(m, ids)

    optimizer = torch.optim.AdamW(watched.parameters(), lr=1e-3)
    with inrun.watch(watched, optimizer, validation=[VALIDATION], loss=next_token) as run:
        with run.batch(range(6)):
            loss(compiled, DATA[:6]).backward()
        assert seen, "the training graph came to the user's backend"
        optimizer.step()


def test_a_model_may_be_compiled_after_watching():
    first = GPT(layers=1)
    plain = trained(copy.deepcopy(first))
    model = copy.deepcopy(first)
    run = trained(model, call=eager(model))
    assert_same(plain, run)
    assert_compiled(run)


def test_a_model_may_be_compiled_in_place():
    model = GPT(layers=1)
    plain = trained(copy.deepcopy(model))
    model.compile(backend="eager")
    run = trained(model)
    assert_same(plain, run)
    assert_compiled(run)
    assert counters["stats"]["unique_graphs"] > 0


def test_a_compiled_function_may_call_the_model():
    model = GPT(layers=1)
    plain = trained(copy.deepcopy(model))

    @torch.compile(backend="eager")
    def step_loss(ids):
        return next_token(model, ids)

    run = trained(model, loss=lambda m, ids: step_loss(ids))
    assert_same(plain, run)
    assert_compiled(run)


def test_single_submodules_may_be_compiled():
    model = GPT(layers=1)
    plain = trained(copy.deepcopy(model))
    for block in model.blocks:
        block.compile(backend="eager")
    run = trained(model)
    assert_same(plain, run)
    assert_compiled(run)


def test_submodules_may_be_replaced_by_compiled_ones():
    model = GPT(layers=1)
    plain = trained(copy.deepcopy(model))
    model.blocks[0].mlp = eager(model.blocks[0].mlp)
    run = trained(model)
    assert np.allclose(plain.history()["value"], run.history()["value"], rtol=1e-9, atol=1e-12)
    assert (run.coverage()["status"] == "scored").all()
    assert_compiled(run)


class Broken(GPT):
    """Two graphs with Python between them."""

    def forward(self, ids):
        x = self.blocks[0](self.embed(ids))
        torch._dynamo.graph_break()
        return self.logits(self.blocks[1](x))


def test_a_graph_break_in_the_middle_changes_no_value():
    plain, compiled = both(Broken())
    assert_same(plain, compiled)
    assert_compiled(compiled)


class BrokenInside(nn.Module):
    """A tensor made of parameters alone crosses the break."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b = (
            nn.Embedding(V, 8),
            nn.Parameter(torch.randn(8, 8)),
            nn.Linear(8, V),
        )

    def forward(self, ids):
        w = self.a.tanh()
        torch._dynamo.graph_break()
        return self.b(self.embed(ids) @ w)


def test_a_graph_may_return_tensors_made_of_parameters():
    first = BrokenInside()
    plain = trained(copy.deepcopy(first))
    with pytest.warns(UserWarning, match="made of parameters alone") as said:
        compiled = trained(eager(copy.deepcopy(first)))
    assert_same(plain, compiled)
    assert len(said) == 1


class Derived(nn.Module):
    """Parameters that go through functions of their own before they meet an example."""

    def __init__(self, function):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.w, self.function = nn.Parameter(torch.rand(8) + 0.5), function

    def forward(self, ids):
        return self.head(self.function(self.embed(ids), self.w))


FUNCTIONS = {
    "scaled": lambda x, w: x * w.exp(),
    "power": lambda x, w: x.abs().add(0.1) ** w.exp(),
    "angle": lambda x, w: torch.atan2(x, w.exp()),
    "angle-directly": lambda x, w: torch.atan2(x, w),
    "divided": lambda x, w: x / w.exp(),
    "clamped": lambda x, w: torch.maximum(x, w.exp() - 1),
    "matrix": lambda x, w: F.linear(x, torch.outer(w, w).softmax(1)),
    "norm": lambda x, w: F.layer_norm(x, (8,), w.exp(), w * w),
    "lerp": lambda x, w: torch.lerp(x, x.sin(), w.sigmoid()),
    "prelu": lambda x, w: F.prelu(x.transpose(1, 2), w.exp()).transpose(1, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_made_of_parameters_is_made_again_in_each_step(name):
    """Weights move a lot here: what was computed in the first step is wrong in the fourth."""

    def loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=0
        ) as run:
            steps_of(model, optimizer, run)
        return run

    first = Derived(FUNCTIONS[name])
    plain = loop(copy.deepcopy(first))
    compiled = loop(eager(copy.deepcopy(first)))
    assert_same(plain, compiled)
    assert_compiled(compiled)


class Scheduled(Derived):
    """A buffer that changes while it trains, applied to a parameter."""

    def __init__(self):
        super().__init__(lambda x, w: x * w)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, ids):
        return self.head(self.embed(ids) * (self.w * self.temperature))


def four_steps(model, train_loss, between=lambda: None):
    """``train_loss(model, rows, step)``; ``between`` is called after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inrun.watch(
        model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=0
    ) as run:
        for step in range(4):
            with run.batch(ids := rows_of(step)):
                train_loss(model, DATA[ids], step).backward()
            optimizer.step()
            optimizer.zero_grad()
            between()
    return run


def assert_followed(change):
    """``change(module)`` after each step: the compiled model is scored with what is there now."""
    first = Scheduled()
    one, two = copy.deepcopy(first), copy.deepcopy(first)

    def loop(model, module):
        return four_steps(model, lambda m, x, _: next_token(m, x), lambda: change(module))

    assert_same(loop(one, one), loop(eager(two), two))


@pytest.mark.filterwarnings("ignore:inrun cannot score inside this compiled graph")
def test_buffers_may_change_between_steps():
    assert_followed(lambda module: module.temperature.mul_(0.5))


class Annealed(Derived):
    """The same, given from outside: a tensor that holds one number."""

    def forward(self, ids, gate=None):
        w = self.w if gate is None else self.w * gate
        return self.head(self.embed(ids) * w)


@pytest.mark.filterwarnings("ignore:inrun cannot score inside this compiled graph")
def test_a_number_may_change_in_each_step():
    def train_loss(model, x, step):
        out = model(x, torch.tensor(0.5**step))
        return F.cross_entropy(out.flatten(0, 1), x.flatten())

    first = Annealed(None)
    models = copy.deepcopy(first), eager(copy.deepcopy(first))
    assert_same(*(four_steps(m, train_loss) for m in models))


@pytest.mark.filterwarnings("ignore:inrun cannot score inside this compiled graph")
def test_a_buffer_may_be_replaced_between_steps():
    def replaced(module):
        module.temperature = module.temperature * 0.5

    assert_followed(replaced)


def test_the_memory_of_weights_may_be_replaced():
    def loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=0
        ) as run:
            for _ in range(3):
                steps_of(model, optimizer, run, 1)
                for p in model.parameters():
                    p.data = p.data.clone()
        return run

    first = Derived(FUNCTIONS["angle-directly"])
    assert_same(loop(copy.deepcopy(first)), loop(eager(copy.deepcopy(first))))


# Loops


def test_compiled_models_accumulate_gradients_and_take_a_smaller_last_batch():
    def loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=0
        ) as run:
            for step in range(4):
                for part in rows_of(step, 4 if step == 2 else 6).split(3):
                    with run.batch(part):
                        (next_token(model, DATA[part]) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        return run

    first = GPT(layers=1)
    compiled = loop(eager(copy.deepcopy(first)))
    assert_same(loop(copy.deepcopy(first)), compiled)
    assert_compiled(compiled)


def test_batches_of_one_and_of_three_alternate():
    first = GPT(layers=1)
    plain, compiled = both(first, rows=lambda step: rows_of(step, 1 if step % 2 else 3))
    assert_same(plain, compiled)
    assert_compiled(compiled)


class Checkpointed(GPT):
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.logits(x)


def test_activation_checkpointing_runs_eagerly():
    first = Checkpointed()
    plain = trained(copy.deepcopy(first))
    with pytest.warns(UserWarning, match="cannot score inside this compiled graph") as said:
        compiled = trained(eager(copy.deepcopy(first)))
    assert len(said) == 1
    assert_same(plain, compiled)


class Dropped(GPT):
    def forward(self, ids):
        return super().forward(ids) + F.dropout(self.token(ids), 0.3, self.training) @ (
            self.token.weight.t()
        )


def test_values_with_dropout_add_up():
    run = trained(eager(Dropped()), audit_every=1)
    assert_compiled(run)
    assert len(run.steps()) == 4 and run.steps()["explained"].iloc[2:].between(0.9, 1.1).all()


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_inside_or_outside_gives_the_values_of_eager_code(inside):
    def loss(model, ids):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids)
        return F.cross_entropy(out[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())

    class Inside(GPT):
        def forward(self, ids):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids)

    def outside(model, ids):
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())

    torch.set_default_dtype(torch.float32)
    first = Inside() if inside else GPT()
    how = outside if inside else loss
    plain, compiled = both(first, loss=how)
    # At step 0 Adam's secant magnifies bfloat16's rounding: there both are as far from float32.
    a, b = (h[h["step"] > 0]["value"] for h in (plain.history(), compiled.history()))
    assert len(a) == len(b) > 0 and np.corrcoef(a, b)[0, 1] > 0.999
    assert np.abs(a - b).max() < 0.02 * a.abs().max()
    assert_compiled(compiled)


def test_evaluation_without_gradients_inside_a_batch_and_between_steps():
    def loss(model, ids):
        with torch.no_grad():
            model(ids)
        return next_token(model, ids)

    def loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seen = []
        with inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=0
        ) as run:
            for step in range(4):
                with run.batch(ids := rows_of(step)):
                    loss(model, DATA[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    seen.append(float(next_token(model, DATA[:7])))
                model.train()
        return run, seen

    first = GPT(layers=1)
    plain, seen = loop(copy.deepcopy(first))
    compiled, same = loop(eager(copy.deepcopy(first)))
    assert_same(plain, compiled)
    assert np.allclose(seen, same, rtol=1e-9)
    assert_compiled(compiled)


def test_more_shapes_than_are_kept_run_eagerly_with_a_warning():
    def loss(model, ids):
        return next_token(model, ids)

    def rows(step):
        return rows_of(step, 2 + step)

    first = GPT(layers=1)
    plain = trained(copy.deepcopy(first), 8, rows=rows)
    with pytest.warns(UserWarning, match="kinds of inputs already") as said:
        compiled = trained(eager(copy.deepcopy(first)), 8, rows=rows)
    assert len(said) == 1
    assert_same(plain, compiled)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, COMPILER])]
)
def test_numbers_that_dynamic_shapes_make_inputs_of(backend):
    """An embedding's ``norm_type`` is a tensor then, and the graph asks for its number."""
    compile = functools.partial(torch.compile, backend=backend, dynamic=True)
    plain, compiled = both(Small(), compile)
    assert_same(plain, compiled, 1e-8)
    assert_compiled(compiled)


def test_dynamic_shapes_take_two_batch_sizes():
    first = GPT(layers=1)
    plain, compiled = both(
        first,
        lambda m: torch.compile(m, backend="eager", dynamic=True),
        n=6,
        rows=lambda step: rows_of(step, 3 + step % 2),
    )
    assert_same(plain, compiled)
    assert_compiled(compiled)


def test_a_layer_may_be_frozen_and_unfrozen():
    def loop(model, module):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with inrun.watch(
            model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=0
        ) as run:
            for step in range(6):
                if step in (2, 4):
                    module.blocks[0].requires_grad_(step == 4)
                with run.batch(ids := rows_of(step)):
                    next_token(model, DATA[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return run

    one = GPT()
    two = copy.deepcopy(one)
    compiled = loop(eager(two), two)
    assert_same(loop(one, one), compiled)
    assert_compiled(compiled)


def test_two_forward_passes_in_one_batch_are_added():
    def loss(model, ids):
        return next_token(model, ids) + next_token(model, ids.flip(1))

    plain, compiled = both(GPT(layers=1), loss=loss)
    assert_same(plain, compiled)
    assert_compiled(compiled)


def test_an_unused_output_and_an_unused_layer_change_nothing():
    class Two(GPT):
        def __init__(self):
            super().__init__(layers=1)
            self.other = nn.Linear(8, 3)

        def forward(self, ids):
            out = super().forward(ids)
            return out, self.other(out[..., :8])

    def loss(model, ids):
        return F.cross_entropy(model(ids)[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    first = Two()
    plain, compiled = both(first, loss=loss, val_loss=loss)
    assert_same(plain, compiled)
    assert_compiled(compiled)


# No recompilation


def frames():
    return (
        counters["stats"]["unique_graphs"],
        counters["frames"]["total"],
        sum(counters["recompiles"].values()),
    )


@pytest.mark.parametrize("targets", [1, 3])
def test_nothing_is_compiled_again_once_it_is_warm(targets):
    model = eager(GPT(layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = {f"t{q}": [DATA[3 * q : 3 * q + 3]] for q in range(targets)}
    with inrun.watch(model, optimizer, targets=data, loss=next_token, audit_every=0) as run:
        steps_of(model, optimizer, run, 3)
        before = frames()
        steps_of(model, optimizer, run, 6)
    assert frames() == before
    assert not counters["graph_break"]
    assert_compiled(run)
    if targets > 1:
        assert are_joined(run)
        assert not run._validator._sweep._capture.backend.eager_only


def test_evaluation_between_steps_compiles_nothing_again():
    model = eager(GPT(layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with inrun.watch(
        model, optimizer, validation=[VALIDATION], loss=next_token, audit_every=2
    ) as run:
        before = None
        for step in range(9):
            steps_of(model, optimizer, run, 1)
            model.eval()
            with torch.no_grad():
                model(DATA[:6])
            model.train()
            if step == 3:
                before = frames()
    assert frames() == before


def test_a_closed_run_leaves_the_compiled_model_alone():
    torch.manual_seed(3)
    model = eager(GPT(layers=1))
    expected = next_token(model, DATA[:6])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with inrun.watch(model, optimizer, validation=[VALIDATION], loss=next_token) as run:
        steps_of(model, optimizer, run, 2)
    loss = next_token(model, DATA[:6])
    loss.backward()
    assert torch.equal(loss, expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("targets", [2, 5])
def test_many_targets_of_a_compiled_model_share_a_pass(targets):
    first = GPT(layers=1)
    data = {f"t{q}": [DATA[2 * q : 2 * q + 2]] for q in range(targets)}
    plain, compiled = both(first, validation=None, targets=data)
    assert_same(plain, compiled)
    assert are_joined(compiled)
