"""Sampled gradients of every model of the zoo against the slow reference."""

import pytest
import torch

from helpers.captures import captured, close, reference_rows, trainable
from helpers.zoo import ZOO
from inrun.curvature.layer import Layer
from inrun.curvature.places import places
from inrun.curvature.samples import Formed, joined, samples


@pytest.mark.parametrize("form", ["ghost", "materialise", "auto"])
@pytest.mark.parametrize("name", ZOO)
def test_samples(name, form):
    problem = ZOO[name]()
    expected = reference_rows(problem)
    _, micro = captured(problem, form=form)
    uses = list(micro.uses)
    params = trainable(problem.model)
    own = places(problem.model.modules(), params)
    assert sorted(k for p in own.values() for k in p.names) == sorted(params)
    with torch.no_grad():
        found = dict(samples(micro, own, params, 1, 2, 3.0))
    met = {k for k, place in own.items() if not expected.keys().isdisjoint(place.names)}
    assert found.keys() == met
    assert micro.uses == uses  # the contraction finds what the capture left
    for k in met:
        rows = [3.0 * expected[n][1:3] if n in expected else None for n in own[k].names]
        g = joined(own[k], rows, params[k])
        layer = Layer(own[k], params[k].shape)
        sizes = layer.matrix or (g[0].numel(),)
        left, right = ([torch.rand(n, dtype=g.dtype) + 0.5 for n in sizes] + [None])[:2]
        if right is None:
            left = left.view(layer.shape)
        for scaled in (False, True):
            ours, wanted = found[k], Formed(g)
            if scaled:
                ours, wanted = ours.scaled(left, right), wanted.scaled(left, right)
            assert close(ours.squares(None, None), wanted.squares(None, None), problem.tolerance)
            if layer.rotated[0]:
                assert close(ours.left(), wanted.left(), problem.tolerance), k
            if layer.rotated[1]:
                assert close(ours.right(), wanted.right(), problem.tolerance), k
