"""G, the gradient as the batch left it: changes that are seen, guessed, or make a step void.

Every loop here runs twice: with inrun told nothing, and in the obvious way, where the change to the
gradient is known because it is made inside the loss. A step is right or void, never wrong.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.scoring.received import BEFORE, CHANGED, Accumulated

X = torch.randn(48, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(2))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def deep():
    """More parameters than the sample has, so that some are watched by their counters alone."""
    layers = [m for _ in range(6) for m in (nn.Linear(7, 7), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), *layers, nn.Linear(7, 3))


def trained(
    first, change, steps=8, zero=lambda o: o.zero_grad(), scale=lambda step: 1.0, audit=1, **options
):
    """``change(model, step)`` is what the loop does to the gradients before the step."""
    model = copy.deepcopy(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with inrun.watch(
            model, optimizer, validation=[(X[40:], Y[40:])], loss=loss, audit_every=audit, **options
        ) as run:
            for step in range(steps):
                rows = torch.arange(5 * step % 40, 5 * step % 40 + 5)
                with run.batch(rows):
                    (loss(model, (X[rows], Y[rows])) * scale(step)).backward()
                change(model, step)
                optimizer.step()
                zero(optimizer)
    return run, [str(w.message) for w in said]


def right_or_void(run, steps=8, rtol=0.1):
    """Do the values add up to what the batch did? Returns the steps that have none."""
    table = run.steps().set_index("step")
    found = run.history().groupby("step")["value"].agg(["sum", lambda x: x.abs().sum()])
    found.columns = ["sum", "size"]
    for step in found.index:
        residual = abs(table.loc[step, "residual"])
        if step >= 2:  # the first two steps of Adam are nearly a sign
            assert residual <= rtol * found.loc[step, "size"], (step, residual)
    return sorted(set(range(steps)) - set(found.index))


def nothing(model, step):
    pass


def test_nothing_is_void_where_nothing_happens():
    run, said = trained(deep(), nothing)
    assert right_or_void(run) == [] and not said


def clipped_from(start, norm=0.05):
    def change(model, step):
        if step >= start:
            nn.utils.clip_grad_norm_(model.parameters(), norm)

    return change


@pytest.mark.parametrize("start", [0, 1, 5])
def test_clipping_by_norm_that_begins_late_gives_the_values_of_a_told_clip(start):
    """Values with the clip told beforehand are those where it is found out."""
    run, _ = trained(deep(), clipped_from(start))
    assert right_or_void(run) == []


def test_the_sum_of_a_late_clip_is_the_batch_share():
    run, said = trained(deep(), clipped_from(5))
    assert not said
    table = run.steps().set_index("step")
    assert table.loc[5:, "explained"].between(0.9, 1.1).all()


def by_value(model, step):
    if step >= 5:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)


def test_clipping_by_value_that_begins_late_voids_at_most_one_step():
    """No single factor: the first such step cannot be undone from a sample of the gradient."""
    run, _ = trained(deep(), by_value)
    void = right_or_void(run, rtol=0.05)
    assert set(void) <= {5}


def exact(first, change, steps=8):
    """The values of a run that keeps every gradient: a change is never the first."""
    return trained(first, change, steps, audit=1)[0].history()


def negate_one(model, step):
    if step == 5:
        model[2].weight.grad.mul_(0.5)


def halve_large(model, step):
    """Only parameters outside the sample of small ones."""
    if step == 5:
        for p in model.parameters():
            if p.ndim == 2:
                p.grad.mul_(0.5)


def halve_small(model, step):
    if step == 5:
        for p in model.parameters():
            if p.ndim == 1:
                p.grad.mul_(0.5)


def replaced(model, step):
    """A new tensor of the same numbers."""
    for p in model.parameters():
        p.grad = p.grad.clone()


def replaced_and_halved(model, step):
    if step >= 5:
        for p in model.parameters():
            p.grad = p.grad * 0.5


def replaced_large_only(model, step):
    if step == 5:
        for p in model.parameters():
            if p.ndim == 2:
                p.grad = p.grad * 0.5


def noise(model, step):
    if step == 5:
        torch.manual_seed(0)
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn_like(p))


def zeroed_layer(model, step):
    if step == 5:
        model[4].weight.grad.zero_()


def unscaled(model, step):
    """As a GradScaler does it: version counters stay."""
    if step >= 5:
        for p in model.parameters():
            p.grad.data.mul_(0.5)


def unscaled_large_only(model, step):
    if step == 5:
        for p in model.parameters():
            if p.ndim == 2:
                p.grad.data.mul_(0.5)


CHANGES = [by_value, negate_one, halve_large, halve_small, replaced, replaced_and_halved,
           replaced_large_only, noise, zeroed_layer, unscaled]  # fmt: skip


HARMLESS = [replaced]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_step_is_right_or_void(change, dtype, monkeypatch):
    first = deep().to(dtype)
    monkeypatch.setitem(globals(), "X", X.to(dtype))
    rtol = 1e-6 if dtype == torch.float64 else 1e-2
    run, _ = trained(first, change, audit=0)
    got, expected = run.history(), exact(first, change)
    void = sorted(set(range(8)) - set(got["step"]))
    assert set(void) <= {5} and (change in HARMLESS or 5 in void)
    expected = expected[~expected["step"].isin(void)]
    for step, rows in got.groupby("step"):
        value = expected.query("step == @step")["value"].to_numpy()
        assert np.allclose(rows["value"], value, rtol=rtol, atol=rtol * np.abs(value).max()), step


def test_unscaling_is_seen_though_counters_stay():
    run, said = trained(deep(), unscaled, audit=0)
    assert set(range(8)) - set(run.history()["step"]) == {5}
    assert len(said) == 1 and "step 5" in said[0] and "void" in said[0]


def test_unscaling_from_the_start_gives_the_values_of_an_unscaled_loss():
    first = deep()

    def unscale(model, step):
        for p in model.parameters():
            p.grad.data.mul_(1 / 1024)

    run, said = trained(first, unscale, scale=lambda step: 1024.0)
    plain, _ = trained(first, nothing)
    assert not said
    assert np.allclose(run.history()["value"], plain.history()["value"], rtol=1e-9)


@pytest.mark.parametrize("to_none", [True, False])
def test_values_do_not_depend_on_how_gradients_are_set_to_zero(to_none):
    first = deep()
    run, said = trained(first, nothing, zero=lambda o: o.zero_grad(set_to_none=to_none))
    plain, _ = trained(first, nothing)
    assert not said
    assert np.allclose(run.history()["value"], plain.history()["value"], rtol=1e-9)


def test_late_clipping_with_gradients_zeroed_in_place_voids_one_step():
    first = deep()
    run, _ = trained(first, clipped_from(5), zero=lambda o: o.zero_grad(set_to_none=False), audit=0)
    plain, _ = trained(first, clipped_from(5), audit=0)
    assert set(range(8)) - set(run.history()["step"]) == {5}
    assert np.allclose(run.history()["value"], plain.history()["value"], rtol=1e-9)


def test_clipping_in_some_steps_only_gives_exact_values():
    def change(model, step):
        if step in (2, 5):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    first = deep()
    run, _ = trained(first, change)
    got, expected = run.history(), exact(first, change)
    assert set(got["step"]) == set(expected["step"])
    assert np.allclose(got["value"], expected["value"], rtol=1e-6, atol=1e-9)


# The class itself


def gradients(n=12, seed=0):
    torch.manual_seed(seed)
    params = {f"p{i}": nn.Parameter(torch.zeros(2 + i)) for i in range(n)}
    for p in params.values():
        p.grad = torch.randn_like(p)
    return params


def current(params):
    return {k: p.grad for k, p in params.items() if p.grad is not None}


def quiet():
    """After steps in which nothing happened."""
    kept = Accumulated()
    for seed in range(3):
        assert kept.keeps_copies
        params = gradients(seed=seed)
        kept.note(params)
        found = kept.compare(current(params))
        assert not found.changed and not found.flags
        assert all(found.G[k] is p.grad for k, p in params.items())
        kept.forget()
    assert not kept.keeps_copies
    return kept


def test_gradients_are_copied_completely_in_the_first_steps():
    kept, params = Accumulated(), gradients()
    kept.note(params)
    before = {k: p.grad.clone() for k, p in params.items()}
    for p in params.values():
        p.grad.clamp_(-0.3, 0.3)
    found = kept.compare(current(params))
    assert found.changed and kept.keeps_copies
    assert all(torch.equal(found.G[k], before[k]) for k in params)


def test_a_quiet_step_gives_a_flag_that_is_down():
    kept, params = quiet(), gradients(seed=1)
    kept.note(params)
    assert not kept._copies
    found = kept.compare(current(params))
    assert list(found.flags) == [CHANGED] and not bool(found.flags[CHANGED])


@pytest.mark.parametrize("which", range(12))
def test_a_change_of_one_parameter_behind_the_counters_raises_the_flag(which):
    kept, params = quiet(), gradients(seed=1)
    kept.note(params)
    params[f"p{which}"].grad.data.mul_(0.5)
    assert bool(kept.compare(current(params)).flags[CHANGED])


def test_a_change_that_torch_counts_raises_the_flag_without_looking():
    kept, params = quiet(), gradients(seed=1)
    kept.note(params)
    params["p3"].grad.mul_(1.0)
    assert bool(kept.compare(current(params)).flags[CHANGED])
    assert kept.keeps_copies


@pytest.mark.parametrize("whole", [True, False])
def test_a_gradient_that_appears_after_the_batch_counts_as_changed(whole):
    kept, params = Accumulated() if whole else quiet(), gradients(seed=1)
    late = params["p0"].grad
    params["p0"].grad = None
    kept.note(params)
    params["p0"].grad = late
    found = kept.compare(current(params))
    assert found.changed and not found.G["p0"].any() if whole else bool(found.flags[CHANGED])


def test_a_gradient_set_to_none_is_left_out_and_is_no_change():
    kept, params = Accumulated(), gradients(seed=1)
    kept.note(params)
    params["p0"].grad = None
    found = kept.compare(current(params))
    assert "p0" not in found.G and not found.changed


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("between", ["nothing", "added", "behind the counters"])
def test_a_gradient_changed_between_two_batches_raises_the_flag(whole, between):
    kept, params = Accumulated() if whole else quiet(), gradients(seed=1)
    kept.note(params)
    for p in params.values():
        if between == "added":
            p.grad.add_(1.0)
        elif between != "nothing":
            p.grad.data.add_(1.0)
    kept.begin(params, first=False)
    for p in params.values():
        p.grad = p.grad + 1.0
    kept.note(params)
    assert bool(kept.compare(current(params)).flags[BEFORE]) == (between != "nothing")


@pytest.mark.parametrize("whole", [True, False])
def test_a_gradient_before_the_first_batch_raises_the_flag_unless_zero(whole):
    for zero in (True, False):
        kept, params = Accumulated() if whole else quiet(), gradients(seed=1)
        for p in params.values() if zero else ():
            p.grad.zero_()
        kept.begin(params, first=True)
        kept.note(params)
        assert bool(kept.compare(current(params)).flags[BEFORE]) is not zero


def test_memory_that_is_used_again_never_holds_another_batch():
    """Per-example gradients are written to the same memory in every step: batches of other sizes,
    several per step, and one that failed half-way change nothing."""
    torch.manual_seed(0)
    first = deep().double()
    plan = [[6], [6], [4, 6], [4, 6], [9], "failed", [3], [6, 2], [6]]  # rows of each batch

    def history(form, training):
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = inrun.watch(
            model, optimizer, validation=[(X[40:], Y[40:])], loss=loss, form=form,
            training=training,
        )  # fmt: skip
        with run:
            for sizes in plan:
                if sizes == "failed":
                    with pytest.raises(RuntimeError, match="stop"), run.batch(range(6)):
                        loss(model, (X[:6], Y[:6])).backward()
                        raise RuntimeError("stop")
                    optimizer.zero_grad()
                    continue
                at = 0
                for n in sizes:
                    rows = torch.arange(at, at + n)
                    with run.batch(rows):
                        (loss(model, (X[rows], Y[rows])) / len(sizes)).backward()
                    at += n
                optimizer.step()
                optimizer.zero_grad()
            used = len(run._capture.blocks._memory)
        return run.history(), used

    expected, none = history("ghost", "bitwise")
    found, used = history("materialise", "fast")
    assert used and not none  # the memory was in use
    np.testing.assert_array_equal(found["id"], expected["id"])
    np.testing.assert_allclose(found["value"], expected["value"], rtol=1e-9, atol=1e-15)


def test_memory_of_failed_batches_and_closed_runs_is_free():
    torch.manual_seed(0)
    model = deep().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = inrun.watch(
        model, optimizer, validation=[(X[40:], Y[40:])], loss=loss, form="materialise"
    )
    blocks = run._capture.blocks
    sizes = []
    for failures in (0, 0, 5, 0):
        for _ in range(failures):
            with pytest.raises(RuntimeError, match="stop"), run.batch(range(6)):
                loss(model, (X[:6], Y[:6])).backward()
                raise RuntimeError("stop")
            optimizer.zero_grad()
        with run.batch(range(6)):
            last = loss(model, (X[:6], Y[:6]))
            last.backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(blocks._memory))
    assert sizes[0] > 0 and len(set(sizes)) == 1
    run.close()
    assert last.grad_fn is not None and len(blocks._memory) == 0  # though the graph is still there


def test_host_memory_is_the_same_in_every_step():
    from inrun.gradients.blocks import Blocks

    blocks, like = Blocks(), torch.zeros(1, dtype=torch.float64)
    shapes = [(4, 4), (3,), (2, 2), (4, 4)]
    for shape in shapes:
        assert blocks.take(shape, like) is None
    blocks.over()
    seen = []
    for _ in range(3):
        taken = [blocks.take(shape, like) for shape in shapes]
        assert [tuple(x.shape) for x in taken] == shapes
        for i, x in enumerate(taken):
            x.fill_(i)
        assert [float(x.sum()) for x in taken] == [0, 3, 8, 48], "each has its own"
        seen.append([x.data_ptr() for x in taken])
        blocks.over()
    assert seen[0] == seen[1] == seen[2]
    small, large = torch.zeros(2, 3), torch.zeros(5, 3, dtype=torch.float64)
    assert blocks.scratch(small).data_ptr() == blocks.scratch(small).data_ptr()
    for like in (large, small, large):
        found = blocks.scratch(like)
        assert found.shape == like.shape and found.dtype == like.dtype
        assert found.data_ptr() == blocks._scratch.data_ptr()


def test_gradients_are_formed_without_reused_memory_if_there_is_too_little(monkeypatch):
    """Where the system refuses so much at once, gradients are formed as before."""
    from inrun.gradients.blocks import Blocks

    blocks = Blocks()
    like = torch.zeros(1, dtype=torch.float64)
    assert blocks.take((4, 4), like) is None
    with monkeypatch.context() as m:
        empty = torch.empty

        def refusing(n, **options):
            if n:
                raise RuntimeError("not enough memory")
            return empty(n, **options)

        m.setattr(torch, "empty", refusing)
        blocks.over()
    assert blocks.take((4, 4), like) is None
    blocks.over()
    assert blocks.take((4, 4), like) is not None
