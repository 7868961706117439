"""The autograd graph of a pass compared with the plan's: every difference is noticed."""

import pytest
import torch

from inrun.capture.graph import Graph, Wanted
from inrun.capture.reading import OtherPlanError

W, V = (torch.nn.Parameter(torch.randn(4, 6)) for _ in range(2))


def two_nodes(w, v):
    return w.tanh() * w.tanh()


def one_node(w, v):
    a = w.tanh()
    return a * a


def parts(first, second):
    def out(w, v):
        a = w.exp().chunk(2, 1)
        return a[first].tanh() + a[second]

    return out


def plain(w, v):
    return w.exp().sum(1).tanh()


OTHERS = {
    "another operation": lambda w, v: w.sin().sum(1).tanh(),
    "one more": lambda w, v: w.exp().exp().sum(1).tanh(),
    "one less": lambda w, v: w.sum(1).tanh(),
    "another dimension": lambda w, v: w.exp().sum(0).tanh(),
    "another parameter": lambda w, v: v.exp().sum(1).tanh(),
    "a constant": lambda w, v: (w.detach().exp().sum(1) + v.sum()).tanh(),
    "an operand more": lambda w, v: (w.exp() + v).sum(1).tanh(),
}
PAIRS = {name: (plain, other) for name, other in OTHERS.items()} | {
    "operands exchanged": (lambda w, v: w - v, lambda w, v: v - w),
    "one node in the place of two": (two_nodes, one_node),
    "two nodes in the place of one": (one_node, two_nodes),
    "another output of a node": (parts(0, 1), parts(1, 0)),
    "the same output twice": (parts(0, 1), parts(0, 0)),
}


def learned(function):
    graph = Graph()
    graph.number(function(W, V).grad_fn)
    return graph


def follow(entries, out):
    graph = Graph(Wanted(entries))
    graph.number(out.grad_fn)
    return graph


@pytest.mark.parametrize("name", PAIRS)
def test_every_difference_is_noticed(name):
    plan, other = PAIRS[name]
    wanted = learned(plan)
    again = follow(wanted.entries, plan(W, V))
    assert sorted(again.numbers.values()) == sorted(wanted.numbers.values())
    assert all(again.node(n) is node for node, n in again.numbers.items())
    with pytest.raises(OtherPlanError):
        follow(wanted.entries, other(W, V))


def test_a_walk_ends_at_taps_and_at_what_was_met_before():
    def passed(graph, swap=False):
        a = W.exp()
        graph.tapped(a.grad_fn)
        b, c = (a * 2).tanh(), (a + V).sin()
        first, second = (c, b) if swap else (b, c)
        numbers = [graph.number(x.grad_fn) for x in (first, second, b)]
        return [*numbers, graph.number((b * c).grad_fn)]

    plan = Graph()
    wanted = passed(plan)
    assert len(set(wanted)) == 3 and min(plan.numbers.values()) == -1
    assert passed(Graph(Wanted(plan.entries))) == wanted
    with pytest.raises(OtherPlanError):
        passed(Graph(Wanted(plan.entries)), swap=True)


def test_the_plan_has_no_more_walks():
    graph = follow(learned(plain).entries, plain(W, V))
    with pytest.raises(OtherPlanError):
        graph.number(V.exp().grad_fn)
