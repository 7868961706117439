"""Sampled gradients of every model of the zoo against the slow reference."""

import pytest
import torch

from helpers.captures import captured, close, reference_rows, trainable
from helpers.zoo import ZOO
from inrun.curvature.layer import Layer
from inrun.curvature.samples import Formed, samples


@pytest.mark.parametrize("form", ["ghost", "materialise", "auto"])
@pytest.mark.parametrize("name", ZOO)
def test_samples(name, form):
    problem = ZOO[name]()
    expected = reference_rows(problem)
    _, micro = captured(problem, form=form)
    uses = list(micro.uses)
    params = trainable(problem.model)
    with torch.no_grad():
        found = dict(samples(micro, params, 1, 2, 3.0))
    assert found.keys() == expected.keys()
    assert micro.uses == uses  # the contraction finds what the capture left
    for k, g in expected.items():
        wanted = Formed(3.0 * g[1:3])
        assert close(found[k].squares(None, None), wanted.squares(None, None), problem.tolerance), k
        left, right = Layer(params[k].shape).rotated
        if left:
            assert close(found[k].left(), wanted.left(), problem.tolerance), k
        if right:
            assert close(found[k].right(), wanted.right(), problem.tolerance), k
