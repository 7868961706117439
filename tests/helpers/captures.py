"""One captured training pass, its per-example gradients, and what they are compared with."""

from helpers.zoo import Problem
from inrun.capture.capture import Capture
from inrun.exact import reference
from inrun.gradients.nodes import pull_back


def trainable(model):
    return {k: p for k, p in model.named_parameters() if p.requires_grad}


def captured(problem: Problem, **options):
    """The capture and the micro-batch of one forward and backward pass."""
    problem.model.zero_grad()
    options = {"batch_dim": problem.batch_dim} | options
    capture = Capture(problem.model, trainable(problem.model), **options)
    with capture.batch(problem.B) as micro:
        problem.train_loss().backward()
    return capture, micro


def gradients_of(micro):
    rows = {}
    for node, records in micro.records.items():
        for record in records:
            for k, g in pull_back(node, record.rows()[: micro.rows]).items():  # without nobody's
                rows[k] = rows[k] + g if k in rows else g
    return rows


def nobodys(micro):
    """Gradients that belong to no example: [*W] by parameter."""
    found = {}
    for node, records in micro.records.items():
        for record in records:
            for k, g in pull_back(node, record.rows()[micro.B :]).items():
                found[k] = found.get(k, 0) + g.sum(0)
    return found


def reference_rows(problem: Problem):
    return reference.per_example_gradients(
        problem.model, problem.batch, problem.B, problem.forward, problem.loss, problem.batch_dim
    )


def close(got, expected, tolerance, floor=1e-6):
    """``floor``: gradients that are zero but for rounding (a key's bias) have no relative error."""
    return float((got - expected).norm()) <= tolerance * max(float(expected.norm()), floor)
