"""Recorded passes: the training is the same to the bit and so are the values, and where a recording
would miss something the model's own passes are run."""

import copy
import random
import sys
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import inrun
import inrun.gpt
from helpers.loops import next_token
from helpers.tape import Dropped, TapeRecorder
from inrun.capture import signals
from inrun.replay import replays

STEPS = 24
USUAL = 4  # passes before one is recorded
FIRST = USUAL + 3  # batches before a replay: the model, its outputs are looked at, it is recorded


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    found = TapeRecorder()
    monkeypatch.setattr(replays, "recorder_for", lambda device: found)
    monkeypatch.setattr(replays, "USUAL", USUAL)
    monkeypatch.setattr(signals, "SOME", 0)
    monkeypatch.setattr(signals, "FEW", 0)  # NumPy's work is not recorded; a GPU has none of it
    return found


def made(kind=inrun.gpt.GPT):
    torch.manual_seed(0)
    return kind(23, 8, 2, 2, 64)


def batches(steps=STEPS, rows=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 23, (rows, 5), generator=generator) for _ in range(steps)]


def trained(
    model, *, loss=next_token, data=None, before=None, autocast=False, together=1,
    estimator="secant", validation=next_token, **watch,
):  # fmt: skip
    """Train a copy of the model; returns the run, the model, the optimizer and the losses.
    ``before(step, model)`` is called before each batch; ``together`` batches make a step."""
    torch.manual_seed(0)
    random.seed(0)
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(0, 23, (4, 5), generator=torch.Generator().manual_seed(2))
    run = inrun.watch(
        model, optimizer, validation=[rows], loss=validation, estimator=estimator, **watch
    )
    losses = []
    for step, batch in enumerate(data or batches()):
        if before is not None:
            before(step, model)
        with run.batch(range(6 * step, 6 * step + len(batch))):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                found = loss(model, batch)
            found.backward()
        losses.append(found)  # kept as they are
        if step % together == together - 1:
            optimizer.step()
            optimizer.zero_grad()
    return run, model, optimizer, losses


def compare(model, replayed=None, exact=True, **how):
    """Train with recordings and without: all must be the same; returns the run with recordings.
    ``replayed``: how many passes must be, by default all but the first."""
    usual = trained(model, **how)
    state = torch.get_rng_state(), random.getstate()
    again = trained(model, cuda_graphs=True, **how)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    same = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for x, y in zip(usual[1].state_dict().values(), again[1].state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, **same)
    for p, q in zip(usual[1].parameters(), again[1].parameters(), strict=True):
        for k, x in usual[2].state[p].items():
            torch.testing.assert_close(x, again[2].state[q][k], **same)
    torch.testing.assert_close(torch.stack(usual[3]), torch.stack(again[3]), **same)
    assert "forward" not in vars(again[1])
    left, right = again[0].history(), usual[0].history()
    assert left["id"].tolist() == right["id"].tolist()
    assert usual[0].steps()["void"].isna().all() and again[0].steps()["void"].isna().all()
    names = [k for k in right if k not in ("id", "step")]
    torch.testing.assert_close(
        torch.tensor(left[names].to_numpy(float)), torch.tensor(right[names].to_numpy(float)),
        rtol=1e-4, atol=1e-6 * right["value"].abs().max(), equal_nan=True,
    )  # fmt: skip
    found, count = again[0].replays, STEPS - FIRST if replayed is None else replayed
    if isinstance(count, slice):
        assert count.start <= found.count < count.stop, found.why
    else:
        assert found.count == count, found.why
    return again[0]


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("kind", [inrun.gpt.GPT, Dropped])
def test_the_training_is_the_same_to_the_bit_and_so_are_the_values(kind, training, recorder):
    compare(made(kind), training=training)
    assert (recorder.trials, recorder.recordings) == (1, 2)


@pytest.mark.parametrize("form", ["ghost", "materialise"])
def test_in_every_form(form):
    compare(made(), form=form)


def test_under_autocast():
    compare(made(Dropped), autocast=True)


@pytest.mark.parametrize("estimator", ["shapley", ["secant", "influence"], "tangent"])
def test_with_other_estimators(estimator):
    compare(made(), estimator=estimator)


def test_a_language_model_of_transformers_that_returns_its_loss_and_a_cache():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=23, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model, caches = transformers.GPT2LMHeadModel(config), []

    def loss(model, ids):
        out = model(input_ids=ids, labels=ids)
        assert type(out).__name__ == "CausalLMOutputWithCrossAttentions"
        assert out["loss"] is out.loss and out.logits.shape == (len(ids), 5, 23)
        caches.append(out.past_key_values.layers[0].keys)
        return out.loss

    run = compare(model, loss=loss, validation=lambda m, ids: m(input_ids=ids, labels=ids).loss)
    assert len({x.data_ptr() for x in caches}) == len(caches)  # each has its own memory
    assert run.history()["loss"].notna().all()  # signals are those of each batch


def test_what_a_batch_returned_stays_as_it_was():
    kept = []

    def loss(model, ids):
        out = model(ids)
        kept.append((out, out.detach().clone()))
        return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    compare(made(), loss=loss)
    assert all(torch.equal(out, copied) for out, copied in kept)


Named = namedtuple("Named", "logits aside")


@dataclass
class Data:
    logits: torch.Tensor
    name: str


OUTPUTS = {
    "tuple": (lambda x: (x, [x * 2, "text"]), lambda out: out[0]),
    "dictionary": (lambda x: {"logits": x, "n": 3}, lambda out: out["logits"]),
    "named tuple": (lambda x: Named(x, None), lambda out: out.logits),
    "dataclass": (lambda x: Data(x, "name"), lambda out: out.logits),
}


class Wrapped(inrun.gpt.GPT):
    output = "tuple"

    def forward(self, ids):
        return OUTPUTS[self.output][0](super().forward(ids))


@pytest.mark.parametrize("output", OUTPUTS)
def test_whatever_holds_the_outputs(output):
    model, of = made(Wrapped), OUTPUTS[output][1]
    model.output = output

    def loss(model, ids):
        return next_token(lambda given: of(model(given)), ids)

    compare(model, loss=loss, validation=loss)


def test_several_shapes_have_recordings_of_their_own(recorder):
    data = [b[: 6 if i % 2 else 4] for i, b in enumerate(batches(STEPS))]
    compare(made(), data=data, replayed=STEPS - 2 * FIRST + 1)
    assert recorder.recordings == 4


# What a recording would miss


class Scaled(inrun.gpt.GPT):
    scale, seen = 1.0, None

    def logits(self, x):
        return super().logits(x) * self.scale


def at(number, change):
    return lambda step, model: change(model) if step == number else None


CHANGES = {
    "attribute": lambda m: setattr(m, "scale", 2.0),
    "weights elsewhere": lambda m: setattr(m.norm.bias, "data", m.norm.bias.data.clone() + 1),
    "option of a layer": lambda m: setattr(m.norm, "eps", 0.1),
    "frozen": lambda m: m.norm.weight.requires_grad_(False),
    "another layer": lambda m: m.blocks.append(nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_recorded_anew(change):
    before = at(10, CHANGES[change])
    run = compare(made(Scaled), before=before, replayed=slice(10 - FIRST + 1, STEPS - FIRST))
    assert run.replays.why is None


def test_a_model_that_is_changed_all_the_time_is_left_alone():
    run = compare(made(Dropped), before=lambda step, model: model.train(step % 2 == 0), replayed=0)
    assert "again and again" in run.replays.why


def test_validation_between_batches_changes_nothing():
    def before(step, model):
        model.eval()
        model(batches(1)[0])
        model.train()

    compare(made(Dropped), before=before)


class Counting(inrun.gpt.GPT):
    """Its forward pass writes to an attribute, and depends on it."""

    passes = 0

    def logits(self, x):
        self.passes += 1
        return super().logits(x) * (2.0 if self.passes > 10 else 1.0)


class Storing(inrun.gpt.GPT):
    """Its forward pass leaves a tensor."""

    def logits(self, x):
        self.size = x.detach().square().mean()
        return super().logits(x)


@pytest.mark.parametrize("kind", [Counting, Storing])
def test_a_model_that_changes_itself_is_left_alone(kind):
    seen = []

    def loss(model, ids):
        found = next_token(model, ids)
        seen.append(getattr(model, "size", torch.ones(())))
        return found

    compare(made(kind), loss=loss, replayed=0)
    assert torch.equal(torch.stack(seen[:STEPS]), torch.stack(seen[STEPS:]))


class Random(inrun.gpt.GPT):
    """Leaves a layer out by chance: random numbers of the host."""

    def embed(self, ids):
        x = super().embed(ids)
        return x * 2 if random.random() < 0.0 else x


WITH_GRADIENT = torch.ones(8, requires_grad=True)


class Leaking(inrun.gpt.GPT):
    """Uses a tensor with a gradient that is none of its parameters."""

    def logits(self, x):
        return super().logits(x * WITH_GRADIENT)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Random, "random numbers on the host"),
        (Leaking, "tensors with gradients that are not its parameters"),
    ],
)
def test_a_pass_that_cannot_be_recorded_runs_as_usual(kind, why, caplog):
    caplog.set_level("INFO", "inrun")
    compare(made(kind), replayed=0, validation=lambda m, ids: next_token(m, ids))
    assert why in caplog.text


@pytest.mark.parametrize("part", ["trial", "recording", "backward"])
def test_a_recording_that_fails_leaves_nothing_behind(part, recorder, caplog):
    caplog.set_level("INFO", "inrun")
    recorder.fails = part
    compare(made(Dropped), replayed=0)
    assert recorder.settled == recorder.trials == 1 and "RuntimeError" in caplog.text


def test_a_model_with_hooks_is_left_alone():
    seen = []

    def before(step, model):
        if step == 8:
            model.blocks[0].register_forward_hook(lambda *given: seen.append(step))

    run = compare(made(), before=before, replayed=8 - FIRST)
    assert run.replays.why == "modules have hooks" and len(seen) == 2 * (STEPS - 8)


def test_accumulated_batches_are_not_overwritten():
    run = compare(made(), together=2, replayed=slice(0, 2))
    assert "accumulated" in run.replays.why


def test_accumulation_that_begins_later():
    """The first batch of the step was replayed when the second one begins."""
    torch.manual_seed(0)
    found = []
    for graphs in (False, True):
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = inrun.watch(
            model, optimizer, validation=batches(1), loss=next_token, cuda_graphs=graphs
        )
        for step, batch in enumerate(batches()):
            with run.batch(range(6)):
                next_token(model, batch).backward()
            if step < 8 or step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append((run.history()["value"].to_numpy(), [p.clone() for p in model.parameters()]))
        assert run.steps()["void"].isna().all()
    assert run.replays.count == 8 - FIRST + 1
    torch.testing.assert_close(*(torch.tensor(x) for x, _ in found), rtol=1e-4, atol=1e-9)
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_a_model_that_is_called_twice_in_a_batch_is_left_alone():
    def loss(model, ids):
        return next_token(model, ids) + next_token(model, ids.flip(1))

    run = compare(made(Dropped), loss=loss, replayed=0, validation=next_token)
    assert "several times" in run.replays.why


def test_a_second_call_that_comes_later():
    """Both passes of that batch are right, the replayed one too."""
    calls = []

    def loss(model, ids):
        calls.append(0)
        found = next_token(model, ids)
        return found + next_token(model, ids.flip(1)) if len(calls) % STEPS == 10 else found

    run = compare(made(), loss=loss, replayed=10 - FIRST, validation=next_token, exact=False)
    assert "several times" in run.replays.why


def test_a_loop_that_leaves_out_backward_passes():
    """The memory of a replay whose backward pass may still come is not used again."""
    held, steps = [], STEPS + 4

    def train(graphs):
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = inrun.watch(
            model, optimizer, validation=batches(1), loss=next_token, cuda_graphs=graphs
        )
        for step, batch in enumerate(batches(steps)):
            if step == 10:
                with pytest.warns(UserWarning, match="ended without a backward"), run.batch([0]):
                    held.append(next_token(model, batch[:1]))
            with run.batch(range(6)):
                found = next_token(model, batch)
                if step != 12:
                    found.backward()
            if step == 12:
                held.append(found)
            optimizer.step()
            optimizer.zero_grad()
        return run, [p.detach() for p in model.parameters()]

    with pytest.warns(UserWarning):
        usual, replayed = train(False), train(True)
    assert all(map(torch.equal, usual[1], replayed[1]))
    assert 0 < replayed[0].replays.count < steps - USUAL


def replaying(model, loss=next_token):
    """A run that replays its passes, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=batches(1), loss=loss, cuda_graphs=True)
    for batch in batches(FIRST + 1):
        with run.batch(range(6)):
            loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.replays.count == 1, run.replays.why
    return run, optimizer


REFUSED = "backward\\(\\) through a recorded pass"


def test_a_second_backward_pass_is_refused():
    """The first one has written over what the second would need."""
    model = made()
    run, _ = replaying(model)
    batch = batches(1)[0]
    with run.batch(range(6)):
        loss = next_token(model, batch)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward()


def test_a_late_backward_pass_is_refused():
    model = made()
    run, optimizer = replaying(model)
    first, second = batches(2)
    with run.batch(range(6)):
        late = next_token(model, first)
        late.backward(retain_graph=True)
    optimizer.step()
    with run.batch(range(6)):
        next_token(model, second).backward()
        with pytest.raises(RuntimeError, match=REFUSED):
            late.backward()


class Heads(inrun.gpt.GPT):
    """Returns logits and something with a part of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.aside = nn.Linear(23, 2)

    def forward(self, ids):
        logits = super().forward(ids)
        return logits, self.aside(logits)


def test_a_head_that_the_loss_does_not_use_gets_no_gradient():
    """Zeros in .grad would let the optimizer decay it."""

    def loss(model, ids):
        return next_token(lambda given: model(given)[0], ids)

    run = compare(made(Heads), loss=loss, validation=loss)
    assert run.replays.why is None


def test_a_loss_of_other_outputs_is_refused():
    model = made(Heads)
    run, _ = replaying(model, lambda m, ids: next_token(lambda given: m(given)[0], ids))
    batch = batches(1)[0]
    with pytest.raises(RuntimeError, match=REFUSED), run.batch(range(6)):
        out, more = model(batch)
        (out.sum() + more.sum()).backward()


@pytest.mark.parametrize("keeps", ["by name", "by position", "twice"])
def test_a_loop_that_may_go_backward_again_is_left_alone(keeps):
    model = made(Heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = inrun.watch(
        model, optimizer, validation=batches(1), loss=lambda m, b: m(b)[0].square().mean(),
        cuda_graphs=True,
    )  # fmt: skip
    for batch in batches(FIRST + 1):
        with run.batch(range(6)):
            out, aside = model(batch)
            if keeps == "twice":
                out.square().mean().backward(retain_graph=True)
                aside.square().mean().backward()
            elif keeps == "by name":
                out.square().mean().backward(retain_graph=True)
            else:
                torch.autograd.backward([out.square().mean()], None, True)
        optimizer.step()
        optimizer.zero_grad()
    assert run.replays.count == 0 and "several times" in run.replays.why


def test_inputs_that_were_one_tensor_and_are_two():
    """They are copied to the places where the pass reads them, and there was one."""

    class Two(inrun.gpt.GPT):
        def forward(self, ids, labels):
            logits = super().forward(ids)[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    data = batches()
    others = {id(ids): ids.clone() for ids in data[11:]}

    def loss(model, ids):
        return model(ids, others.get(id(ids), ids))

    loop = {"loss": loss, "data": data, "validation": lambda m, b: m(b, b)}
    compare(made(Two), replayed=slice(1, STEPS), **loop)


GLOBAL = {"scale": 1.0}


class Global(inrun.gpt.GPT):
    def logits(self, x):
        return super().logits(x) * GLOBAL["scale"]


def test_a_global_variable_that_the_model_names(monkeypatch):
    def before(step, model):
        monkeypatch.setitem(GLOBAL, "scale", 1.0 if step < 10 else 2.0)

    compare(made(Global), before=before, replayed=slice(10 - FIRST, STEPS - FIRST))


def test_a_setting_of_torch_that_is_changed():
    def before(step, model):
        torch.use_deterministic_algorithms(step >= 10)

    try:
        compare(made(), before=before, replayed=10 - FIRST)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_python_changes_elsewhere_is_seen_when_a_replay_is_proven_again(monkeypatch):
    """What can change a pass and is reached neither from the model nor from its code: a replay
    stays what it was until then. docs/costs.md says so."""
    monkeypatch.setattr(replays, "AGAIN", 4)
    elsewhere = ([1.0],)

    class Hidden(inrun.gpt.GPT):
        def logits(self, x):
            return super().logits(x) * getattr(sys.modules[__name__], "HID" + "DEN")[0][0]

    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", elsewhere, raising=False)
    model = made(Hidden)
    run, optimizer = replaying(model)
    elsewhere[0][0], seen = 2.0, []
    for batch in batches(8):
        with run.batch(range(6)):
            out = model(batch)
            next_token(lambda ids, out=out: out, batch).backward()
        with torch.no_grad():
            seen.append(torch.allclose(out, model(batch), atol=1e-5))
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [False] * 3 + [True] * 5
    assert run.replays.count == 4 and "outputs differ" in run.replays.why


# The proof


SKIPPED = {
    "forward": torch.ops.aten.gelu.default,
    "backward": torch.ops.aten.gelu_backward.default,
    "buffers": torch.ops.aten.add_.Tensor,  # BatchNorm counts its batches
    "random": torch.ops.aten.bernoulli_.float,
}


@pytest.mark.parametrize("part", SKIPPED)
def test_a_recorder_that_leaves_something_out_is_found_out(part, recorder, caplog):
    caplog.set_level("INFO", "inrun")
    skipped = []

    def skips(func):
        skipped.extend([func] if func is SKIPPED[part] else [])
        return func is SKIPPED[part]

    recorder.skips = skips
    run = compare(made(Dropped), replayed=0)
    assert skipped and "not the model's own pass" in run.replays.why
    assert run.replays.why in caplog.text


@pytest.mark.parametrize("exact", [True, False])
def test_a_recorder_that_repeats_old_numbers_is_found_out(exact, recorder):
    """A recording made with the weights of one step, replayed with those of another."""
    recorder.exact = exact
    recorder.skips = lambda func: func is torch.ops.aten.embedding.default
    assert "outputs differ" in compare(made(), replayed=0).replays.why


def test_a_gpu_is_allowed_to_round(recorder):
    recorder.exact = False
    compare(made(Dropped), autocast=True)


def test_the_model_is_as_it_was_after_an_error():
    model, held = made(), []
    model.forward = own = model.forward  # as accelerate does
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=batches(1), loss=next_token, cuda_graphs=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), run.batch(range(6)):
            held.append(vars(model)["forward"])
            next_token(model, batches(1)[0]).backward()
            raise ZeroDivisionError
        assert vars(model)["forward"] is own
    run.close()
    assert run.replays.why == "the run is closed"


def test_check_looks_at_the_models_own_passes():
    def before(step, model):
        if step == 8:
            checks.append(runs[-1].check())

    checks, runs, watch = [], [], inrun.watch

    def watched(*given, **how):
        runs.append(watch(*given, **how))
        return runs[-1]

    inrun.watch = watched
    try:
        run = compare(made(), before=before, replayed=STEPS - FIRST - 1)
    finally:
        inrun.watch = watch
    assert run.replays.count and all(c.verdict for c in checks)


def test_nothing_is_recorded_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = inrun.watch(model, optimizer, validation=batches(1), loss=next_token, cuda_graphs=True)
    assert run.replays is None
