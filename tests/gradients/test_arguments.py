"""Arguments taken apart and put together again."""

import pytest
import torch

from inrun.gradients.arguments import flatten

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)

CALLS = {
    "nothing": ((), {}),
    "row": ((A, 1, None), {}),
    "keywords": ((A,), {"weight": B, "bias": None, "p": 0.5}),
    "only-keywords": ((), {"input": A, "other": B}),
    "list": (([A, B, C], 1), {}),
    "list-then-more": ((A, [B, C], 2, A), {"dim": 1}),
    "two-lists": (([A, B], [C], 3), {}),
    "list-in-a-keyword": ((A, 7), {"tensors": (B, C), "dim": 0}),
    "keyword-after-a-list": (([A, B],), {"dim": 0, "out": C}),
    "nested": (([A, [B, (C, 1)], None], {"k": A}), {"x": ([B], 2)}),
    "numbers-stay-whole": ((A, (1, 2), [3, [4]]), {"shape": (5, 6)}),
    "index": ((A, (slice(None), B.long(), None, Ellipsis)), {}),
    "index-and-value": ((A, (slice(1, 2, None), (C > 1), 0), B), {}),
    "index-of-lists": ((A, ([0, 1], B.long())), {}),
    "empty-containers": ((A, [], (), {}), {"x": []}),
    "parameter": ((torch.nn.Parameter(A), {"w": torch.nn.Parameter(B)}), {}),
    "named": ((torch.return_types.max((A, B)), C), {}),
}


def alike(x, y):
    if isinstance(x, torch.Tensor):
        return x is y
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(alike, x, y))
    if isinstance(x, dict):
        return list(x) == list(y) and all(alike(x[k], y[k]) for k in x)
    return x == y and type(x) is type(y)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_the_same_after_flattening_and_back(name):
    args, kwargs = CALLS[name]
    leaves, spec = flatten(args, kwargs)
    again = spec.unflatten(leaves)
    assert alike(args, again[0]) and alike(kwargs, again[1])
    assert all(isinstance(t, torch.Tensor) or not _holds(t) for t in leaves)


def _holds(x):
    """Is there a tensor inside?"""
    if isinstance(x, dict):
        x = list(x.values())
    return isinstance(x, torch.Tensor) or (isinstance(x, (list, tuple)) and any(map(_holds, x)))


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_found_at_its_place(name):
    args, kwargs = CALLS[name]
    leaves, spec = flatten(args, kwargs)
    for i, x in enumerate(args):
        assert spec.argument(i, "none") == i
        assert alike(spec.value(i, leaves), x)
    for j, (k, x) in enumerate(kwargs.items()):
        at = spec.argument(99, k)
        assert at == len(args) + j
        assert alike(spec.value(at, leaves), x)
    assert spec.argument(99, "none") is None


def test_a_position_comes_before_a_keyword():
    _, spec = flatten((A, B), {"bias": C})
    assert spec.argument(1, "bias") == 1
    assert spec.argument(2, "bias") == 2
    assert spec.argument(2, "weight") is None


def test_places_are_numbers_of_leaves():
    leaves, spec = flatten((A, [B, (C, A)], B), {"x": C})
    assert spec.place(0) == 0
    assert spec.place(1) == [1, (2, 3)]
    assert spec.place(2) == 4 and spec.place(3) == 5
    assert leaves[spec.place(1)[1][0]] is C
    _, plain = flatten((A, B), {"x": C})
    assert [plain.place(i) for i in range(3)] == [0, 1, 2]


def test_leaves_may_be_replaced():
    leaves, spec = flatten((A, [B, C]), {"x": (A,)})
    args, kwargs = spec.unflatten([-x for x in leaves])
    assert torch.equal(args[1][1], -C) and torch.equal(kwargs["x"][0], -A)
    args, _ = spec.unflatten(tuple(range(len(leaves))))
    assert args == (0, [1, 2])


def test_a_call_goes_through_unchanged():
    x, at = torch.arange(12.0).view(3, 4), torch.tensor([0, 2])
    for func, args, kwargs in (
        (torch.cat, ([x, x],), {"dim": 1}),
        (torch.Tensor.__getitem__, (x, (at, slice(1, None))), {}),
        (torch.einsum, ("ij,kj->ik", x, x), {}),
        (torch.einsum, ("ij,kj->ik", [x, x]), {}),
        (torch.where, (x > 3, x, torch.zeros(())), {}),
        (torch.nn.functional.linear, (x,), {"weight": x, "bias": None}),
    ):
        leaves, spec = flatten(args, kwargs)
        again, words = spec.unflatten(leaves)
        assert torch.equal(func(*args, **kwargs), func(*again, **words))
