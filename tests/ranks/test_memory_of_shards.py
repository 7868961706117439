"""What docs/distributed.md says of the memory of a rank: 4 P/W beside the plain training, 2 more in
audited steps, and the records of the examples. Every storage is followed."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.sharded_memory import AUDITED, WARM, Live, train
from helpers.ranks import in_ranks

# Its matrices are not among the small parameters, which are copied side by side as well.
SMALL = SimpleNamespace(width=192, layers=4, length=4, batch=1)


def peaks(rank, world):
    torch.set_default_dtype(torch.float32)
    return [train(rank, watch, Live(), SMALL) for watch in (False, True)]


@pytest.mark.slow
def test_tensors_of_a_rank():
    for (parameters, plain), (_, watched) in in_ranks(2, peaks):
        more = [(b - a) / (4 * parameters / 2) for a, b in zip(plain, watched, strict=True)]
        assert all(4 < x < 4.9 for x in more[WARM:AUDITED])
        assert 6 < more[AUDITED] < 6.9
