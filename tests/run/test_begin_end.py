"""``run.begin(ids)`` and ``run.end()`` do what ``with run.batch(ids)`` does."""

import pytest
import torch
from torch import nn

import inrun

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def square(model, x):
    return (model(x) - 1).square().mean()


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, inrun.watch(model, optimizer, validation=[X[16:]], loss=square)


def test_the_same_as_the_with_block():
    found = []
    for block in (True, False):
        model, optimizer, run = parts()
        for step in range(3):
            ids, owner = [f"x{step}", "y"], torch.tensor([0, 0, 1, -1])
            optimizer.zero_grad()
            if block:
                with run.batch(ids, owner=owner):
                    square(model, X[:4]).backward()
            else:
                run.begin(ids, owner=owner)
                square(model, X[:4]).backward()
                run.end()
            optimizer.step()
        found.append(run.history())
    assert found[0].equals(found[1]) and len(found[0]) == 6


def test_an_end_without_a_begin():
    _, _, run = parts()
    with pytest.raises(inrun.BatchError, match=r"run.end\(\) without run.begin\(ids\)"):
        run.end()
    run.end(drop=True)  # where an exception is caught: whether or not a batch was open


def test_a_second_begin_drops_the_open_batch():
    model, optimizer, run = parts()
    run.begin(range(4))
    with pytest.raises(inrun.BatchError, match=r"while a batch is open: call run.end\(\)"):
        run.begin(range(4))
    run.begin(range(4))  # nothing is open any more
    square(model, X[:4]).backward()
    run.end()
    optimizer.step()
    assert run.steps()["void"].isna().all() and len(run.history()) == 4


def test_a_step_before_the_end():
    model, optimizer, run = parts()
    run.begin(range(4))
    square(model, X[:4]).backward()
    with pytest.raises(inrun.BatchError, match=r"after run.end\(\)"):
        optimizer.step()
    run.close()  # ends the open batch


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_in_between(late):
    """What came of the batch is dropped, and the next one is like any other."""
    model, optimizer, run = parts()
    for step in range(3):
        try:
            run.begin(range(4))
            loss = square(model, X[4 * step : 4 * step + 4])
            if step == 1 and not late:
                raise MemoryError("out of memory")
            loss.backward()
            if step == 1:
                raise MemoryError("out of memory")
            run.end()
        except MemoryError:
            run.end(drop=True)
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert run.step == 2 and run.steps()["void"].isna().all()
    assert run._memory.held == 0


def test_closing_an_open_batch():
    model, _, run = parts()
    run.begin(range(4))
    run.close()
    square(model, X[:4]).backward()
    with pytest.raises(inrun.BatchError, match="closed"):
        run.begin(range(4))
    with pytest.raises(inrun.BatchError, match=r"without run.begin"):
        run.end()


def test_inside_a_block():
    _, _, run = parts()
    with pytest.raises(inrun.BatchError, match="one batch at a time"), run.batch(range(4)):
        run.begin(range(4))
