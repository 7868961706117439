"""Sampled entries: the same however they are read. The kernel is interpreted without a GPU."""

import json

import pytest
import torch

from helpers.triton_script import DEVICE, SHAPES, errors_of, prepare

LARGE = [*SHAPES, (97, 53), (0,), (5000,), ()]  # some over the size that is copied


def obvious(tensors):
    """Each tensor by itself."""
    from inrun.scoring.samples import _places

    found = [torch.empty(0, 8, dtype=tensors[0].dtype)]
    for t in tensors:
        if t.numel():
            count, stride, start = _places(t.numel())
            places = [start + stride * min(i, count - 1) for i in range(8)]
            found.append(t.detach().flatten()[places][None])
    return torch.cat(found)


def tensors(dtype, transposed=False):
    torch.manual_seed(0)
    made = [torch.randn(s).to(dtype) for s in LARGE]
    return [t.mT if transposed and t.ndim == 2 else t for t in made]


def main():
    from inrun import kernels
    from inrun.scoring.samples import sampled

    prepare()
    if DEVICE == "cpu":
        kernels.readable = lambda tensors: True
    found = {}
    for dtype in kernels.READABLE:
        own = tensors(dtype)
        expected = obvious(own)
        same = torch.equal(sampled(own), expected)
        own[3].view(-1)[:] = 7.0  # read again, not remembered
        found[str(dtype)] = [same, torch.equal(sampled(own), obvious(own))]
    print(json.dumps(found))


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("triton", reason="needs Triton")
    return errors_of(__file__)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_kernel_reads_the_entries(kernel, dtype):
    assert kernel[f"torch.{dtype}"] == [True, True]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_concatenated_and_viewed_tensors_give_the_entries(dtype, transposed):
    from inrun.scoring.samples import Sample, sampled

    own = tensors(dtype, transposed)
    for some in (own, own[:3], [own[-3]], [own[-2]], [own[-1]]):
        assert torch.equal(sampled(some), obvious(some))
        sample = Sample(some)
        for _ in range(2):
            assert torch.equal(sample.read(), obvious(some))
            for t in some:  # other numbers, then other memory
                t.add_(1.0)
        for t in some:
            t.data = (t.data * 2.0).mT.contiguous().mT if t.ndim == 2 else t.data * 2.0
        assert torch.equal(sample.read(), obvious(some))


def test_each_type_has_a_sample_of_its_own():
    from inrun.scoring.samples import by_kind

    a, b = tensors(torch.float32), tensors(torch.float64)
    mixed = [t for pair in zip(a, b, strict=True) for t in pair]
    found = [sample.read() for sample in by_kind(mixed)]
    assert torch.equal(found[0], obvious(a)) and torch.equal(found[1], obvious(b))


if __name__ == "__main__":
    main()


@torch.no_grad()
def test_views_that_are_kept_follow_the_tensors():
    """Weights whose memory is exchanged, also for other strides at the same address."""
    from inrun.scoring.samples import Sample

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s)) for s in ((4, 4), (70, 80), (0,), (7,))]
    sample = Sample(params, often=True)

    def changes():
        yield
        params[0].mul_(2.0)
        yield
        params[1].data = torch.randn(70, 80)
        yield
        params[0].data = params[0].data.mT
        yield
        params[1].data = params[1].data.view(80, 70).mT
        yield
        params[0].data = torch.randn(4, 4)
        yield

    for _ in changes():
        assert torch.equal(sample.read(), obvious(params))


def test_entries_of_pieces_are_those_of_the_tensors():
    from inrun.scoring.samples import Pieces, sampled

    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (5, 8, 100, 9000, 1)]
    flats = {0: torch.cat([tensors[2], tensors[0]]), 3: torch.cat([tensors[1], *tensors[3:]])}
    where = [(0, 100, 5), (3, 0, 8), (0, 0, 100), (3, 8, 9000), (3, 9008, 1)]
    assert torch.equal(Pieces(where).read(flats), sampled(tensors))
    assert Pieces(where).flats == [0, 3]
