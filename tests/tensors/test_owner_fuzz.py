"""Random programs: whatever the capture says about a tensor is what a change of one example shows.

``helpers.programs`` has the generator and the oracle. Each program runs twice in one capture, with
other numbers, so that what is remembered about a call of the first batch is used in the second.
Where every number of a program depends on one example at most, the per-example gradients are
compared, too: those of the terms of the loss that depend on the example.
"""

from types import SimpleNamespace

import pytest
import torch

from helpers.captures import close, gradients_of
from helpers.programs import (
    Line,
    Module,
    Program,
    Tally,
    claimed_owner,
    generate,
    popcount,
    truths_for,
)
from inrun.capture.capture import Capture
from inrun.errors import BatchError, CaptureError
from inrun.tensors.layout import MIXED, Layout

FEW, MANY = 50, 3_000  # programs
FOLLOWED = 0.94  # of the tensors that depend on one example at most: at least this share


def judged(tally, program, capture, batch, truths, weights, text):
    """One batch: looks at every tensor. The micro-batch, or None where the capture refused."""
    B, model = program.B, capture.model
    everyone = (1 << B) - 1

    def look(name, t, bits, joined, line):
        with torch._C.DisableTorchFunction():
            alive = bool((bits & everyone).any())
            claim = claimed_owner(capture, t, B)
            kind = getattr(capture.provenance.find(t), "name", None)
            tally.count["tensors"] += 1
            tally.count["followed"] += claim is not None
            tally.count["called constant"] += alive and kind == "constant"
            if plain and alive:
                tally.count["plain tensors"] += 1
                tally.count["plain followed"] += claim is not None
            why = None if claim is None else tally.judge(claim, bits, joined, B)
            if why:
                tally.wrong.append(
                    f"{text}\n-> {line}: {name} is said to be of {why}\n{claim}\n{bits}"
                )

    def see(i, env):
        line = program.lines[i]
        tally.count["lines"] += 1
        for k in line.outs:
            look(k, env[k], truths[i].bits[k], truths[i].joined[k], line)
        if line.writes:
            for k, bits in truths[i].after.items():
                if k not in line.outs and k in env:
                    look(k, env[k], bits, torch.zeros(bits.shape, dtype=torch.bool), line)

    plain = is_plain(truths)
    try:
        with capture.batch(B) as micro:
            loss = model(batch.clone(), weights, see)
            if weights and loss.requires_grad:
                loss.backward()
    except (CaptureError, BatchError) as e:
        tally.count["refused"] += 1
        assert str(e)
        return None
    return micro


def is_plain(truths):
    """Does every number depend on one example at most?"""
    return all((popcount(bits) <= 1).all() for t in truths for bits in t.bits.values())


def per_example(program, batch, weights, oracle):
    """The gradients of the terms of the loss that depend on each example, [B, *W]."""
    model = Module(program)
    env = model(batch.clone())
    rows = {k: [] for k in program.params}
    for i in range(program.B):
        loss = sum((env[k] * w * (oracle.alive(k) == 1 << i)).sum() for k, w in weights.items())
        if not loss.requires_grad:
            return None
        found = torch.autograd.grad(
            loss, list(model.parameters()), retain_graph=True, allow_unused=True
        )
        for (k, p), g in zip(model.named_parameters(), found, strict=True):
            rows[k].append(torch.zeros_like(p) if g is None else g)
    return {k: torch.stack(r) for k, r in rows.items()}


def run(seed, tally):
    g = generate(seed)
    program = g.program
    if not program.lines or not program.params:
        return
    tally.count["programs"] += 1
    model = Module(program)
    options = {"form": ("auto", "ghost", "materialise")[seed % 3], "fast": seed % 2 == 1}
    capture = Capture(model, dict(model.named_parameters()), batch_dim=program.batch_dim, **options)
    capture.on_empty = lambda *args: None
    text = f"seed {seed}, {options}\n{program}"
    for truths, oracle in (g.truths, g.oracle), truths_for(program, program.inputs[1], seed):
        if truths is None:
            continue
        batch = oracle.input
        plain = is_plain(truths)
        last = [k for k in oracle.bits if oracle.envs[0][k].is_floating_point()][-1]
        one = popcount(oracle.alive(last)) == 1
        weights = {last: torch.randn(one.shape, generator=g.numbers) * one}
        try:
            expected = per_example(program, batch, weights, oracle) if plain else None
        except RuntimeError:  # written to in place, and needed for the gradient
            expected = None
        if expected is None:
            weights = {}
        try:
            micro = judged(tally, program, capture, batch, truths, weights, text)
            rows = None if micro is None or expected is None else gradients_of(micro)
        except Exception as e:
            tally.wrong.append(f"{text}\n-> {type(e).__name__}: {e}")
            return
        if rows is not None:
            tally.count["gradients"] += 1
            for k, right in expected.items():
                if not close(rows.get(k, torch.zeros_like(right)), right, 1e-9, floor=1e-3):
                    tally.wrong.append(f"{text}\n-> gradients of {k}:\n{rows.get(k)}\n{right}")


def tallied(seeds):
    tally = Tally()
    for seed in seeds:
        run(seed, tally)
    return tally


def check(tally):
    assert not tally.wrong, f"{len(tally.wrong)} are wrong, the first:\n{tally.wrong[0]}\n{tally}"
    counts = tally.count
    assert counts["plain followed"] > FOLLOWED * counts["plain tensors"], str(tally)
    assert counts["gradients"] > 0.2 * counts["programs"], str(tally)


def test_no_tensor_has_a_wrong_owner():
    check(tallied(range(FEW)))


@pytest.mark.slow
def test_no_tensor_of_many_has_a_wrong_owner():
    tally = tallied(range(MANY))
    print(tally)
    check(tally)
    assert tally.count["tensors"] >= 20_000


def test_a_guess_by_size_is_found_out(monkeypatch):
    """The oracle sees what a capture that takes the first dimension of size B would get wrong."""

    def guess(capture, t, B):
        dim = next((d for d, size in enumerate(t.shape) if size == B), None)
        return None if dim is None else dimension(t.shape, dim)

    monkeypatch.setitem(globals(), "claimed_owner", guess)
    tally = tallied(range(20))
    assert any("the wrong example" in text for text in tally.wrong)
    assert any("joins several" in text for text in tally.wrong)


def dimension(shape, dim):
    """Example k is in place k of this dimension."""
    owner = torch.arange(shape[dim])
    return owner.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)


def test_layouts_and_maps_are_expanded():
    t = torch.zeros(2, 6)
    said = SimpleNamespace(provenance=SimpleNamespace(find=lambda t: Layout(1, outer=1, inner=2)))
    assert claimed_owner(said, t, 3).tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    said = SimpleNamespace(
        provenance=SimpleNamespace(find=lambda t: SimpleNamespace(map=torch.tensor([[1], [-1]])))
    )
    assert claimed_owner(said, t, 3).tolist() == [[1] * 6, [-1] * 6]
    said = SimpleNamespace(provenance=SimpleNamespace(find=lambda t: MIXED))
    assert claimed_owner(said, t, 3) is None


def told(*lines, shape=(3, 3)):
    """What the oracle says of the last of some lines: (operands, template, kind, dims)."""
    program = Program(3, 0, [torch.randn(shape)])
    for i, (operands, template, kind, *dims) in enumerate(lines, 1):
        program.lines.append(Line((f"v{i}",), template, operands, kind, *dims))
    truths, _ = truths_for(program, program.inputs[0])
    return truths[-1].bits[f"v{len(lines)}"], truths[-1].joined[f"v{len(lines)}"]


def test_the_oracle_follows_numbers():
    bits, joined = told((("v0",), "X.roll(1, 0)", "move"), (("v1",), "X.T", "move"))
    assert torch.equal(bits, torch.tensor([4, 1, 2]).expand(3, 3))
    assert not joined.any()


def test_the_oracle_sees_examples_that_are_joined():
    flipped = ("v0",), "X.flip(0)", "move"
    bits, joined = told(flipped, (("v0", "v1"), "X + Y", "slot"))
    assert torch.equal(bits[:, 0], torch.tensor([5, 2, 5]))
    assert torch.equal(joined[:, 0], torch.tensor([True, False, True]))
    bits, joined = told((("v0",), "X.sum(0)", "reduce", ((0,),)))
    assert (bits & 7 == 7).all() and joined.all()
    one = "torch.zeros(3, 3).index_add(0, torch.tensor([0, 0, 2]), X)"
    bits, joined = told((("v0",), one, "move"))
    assert torch.equal(bits[:, 0], torch.tensor([3, 0, 4]))
    assert torch.equal(joined[:, 0], torch.tensor([True, False, False]))


def test_the_oracle_excuses_padding_that_meets_a_mean_over_some_rows():
    bits, _ = told(
        (("v0",), "F.pad(X, (0, 1))", "move"),
        (("v1",), "X[1:, :1].mean(0)", "reduce", ((0,),)),
        (("v1", "v2"), "X + Y", "slot"),
    )
    assert (bits[0, 3] & 7, bits[0, 3] >> 3) == (6, 1)


def test_the_oracle_gives_a_look_up_to_the_example_of_its_index():
    program = Program(3, 0, [torch.tensor([[1], [0], [2]])], {"p0": torch.randn(3, 2)})
    program.lines.append(Line(("v1",), "X.flip(0)", ("v0",), "move", shadow="X.flip(0)"))
    program.lines.append(
        Line(("v2",), "F.embedding(X, p0)", ("v1",), "slot", lift="X.unsqueeze(-1)")
    )
    truths, _ = truths_for(program, program.inputs[0])
    assert truths[-1].bits["v2"][:, 0, 0].tolist() == [4, 2, 1]
