"""``inrun.packing``: owner of each token, against a loop over documents."""

import pytest
import torch

import inrun
from inrun.packing import from_cu_seqlens, from_position_ids, from_seq_idx

ROWS = {  # lengths of the documents of each row, and of the padding behind them
    "one": [([4], 0)],
    "flat": [([3, 1, 5, 2], 0)],
    "several-rows": [([5, 3], 0), ([8], 0), ([1, 1, 6], 0)],
    "trailing-tokens": [([3, 2], 3), ([8], 0), ([4], 4)],
    "an-empty-row": [([2, 2], 1), ([], 5), ([5], 0)],
}


def looped(rows):
    """owner, positions, document numbers within the row, attention mask."""
    owner, positions, numbers, mask, k = [], [], [], [], 0
    for lengths, padding in rows:
        own, pos, num, real = [], [], [], []
        for j, n in enumerate(lengths):
            for t in range(n):
                own.append(k)
                pos.append(t)
                num.append(j)
                real.append(1)
            k += 1
        for _ in range(padding):
            own.append(-1)
            pos.append(0)
            num.append(-1)
            real.append(0)
        owner.append(own)
        positions.append(pos)
        numbers.append(num)
        mask.append(real)
    return [torch.tensor(x) for x in (owner, positions, numbers, mask)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", ROWS)
def test_position_ids(name, dtype):
    owner, positions, _, mask = looped(ROWS[name])
    found = from_position_ids(positions.to(dtype), mask)
    assert torch.equal(found, owner) and found.dtype == torch.int64
    assert torch.equal(from_position_ids(positions, mask.bool()), owner)
    if mask.all():
        assert torch.equal(from_position_ids(positions), owner)


def test_position_ids_of_left_padded_rows():
    """As transformers makes them: 1 where the mask is 0."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    owner = torch.tensor([[-1, -1, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert torch.equal(from_position_ids(positions, mask), owner)


def test_a_row_begins_a_document():
    """Also where its positions go on from the row before."""
    positions = torch.tensor([[0, 1, 2], [3, 4, 0]])
    assert from_position_ids(positions).tolist() == [[0, 0, 0], [1, 1, 2]]


def test_position_ids_without_rows():
    positions = torch.tensor([0, 1, 2, 0, 0, 1])
    before = positions.clone()
    assert from_position_ids(positions).tolist() == [0, 0, 0, 1, 2, 2]
    assert torch.equal(positions, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", ROWS)
def test_seq_idx(name, dtype):
    owner, _, numbers, _ = looped(ROWS[name])
    found = from_seq_idx(numbers.to(dtype))
    assert torch.equal(found, owner) and found.dtype == torch.int64


def test_seq_idx_without_rows():
    assert from_seq_idx(torch.tensor([0, 0, 1, 2, -1])).tolist() == [0, 0, 1, 2, -1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("lengths", [[4], [3, 1, 5, 2], [2, 0, 3], [1] * 6])
@pytest.mark.parametrize("trailing", [0, 3])
def test_cu_seqlens(lengths, trailing, dtype):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    N = sum(lengths) + trailing
    owner = [k for k, n in enumerate(lengths) for _ in range(n)] + [-1] * trailing
    assert from_cu_seqlens(bounds, (N,)).tolist() == owner
    assert from_cu_seqlens(bounds, (1, N)).tolist() == [owner]
    assert from_cu_seqlens(bounds, torch.zeros(1, N).shape).dtype == torch.int64
    if not trailing:
        assert from_cu_seqlens(bounds).tolist() == owner


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([[0, 3]], r"shape \(1, 2\)"),
        ([3], r"shape \(1,\).*one entry more than there are documents"),
        ([3, 5], r"must begin with 0 and grow.*\[3, 5\]"),
        ([0, 5, 3], "must begin with 0 and grow"),
    ],
)
def test_cu_seqlens_that_are_none(bounds, message):
    with pytest.raises(inrun.BatchError, match=message):
        from_cu_seqlens(torch.tensor(bounds))


def test_all_say_the_same():
    owner, positions, numbers, _ = looped(ROWS["flat"])
    bounds = torch.tensor([0, 3, 4, 9, 11])
    assert torch.equal(from_cu_seqlens(bounds, owner.shape), owner)
    assert torch.equal(from_position_ids(positions), owner)
    assert torch.equal(from_seq_idx(numbers), owner)
