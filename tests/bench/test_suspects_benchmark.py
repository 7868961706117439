"""Results of several invocations of benchmarks/suspects.py in one file."""

from __future__ import annotations

from benchmarks.suspects import joined


def cell(seed: int, **more) -> dict:
    return {"task": "digits", "kind": "clean", "seed": seed} | more


def test_cells_are_added():
    before = {"date": "then", "commits": ["a"], "note": "busy", "cells": [
        cell(1, auroc=1, prune=1, trainings=2), cell(2, prune=1, trainings=2), cell(3, auroc=3),
        cell(4, auroc=4) | {"kind": "uniform", "prune": 4},
    ]}  # fmt: skip
    new = [cell(3, auroc=5), cell(5, auroc=5, prune=6)]
    found = joined(before, {"date": "now", "commit": "b"}, new, anew=True)
    assert found["cells"] == [
        cell(1, auroc=1),  # what was removed there was of an earlier rule
        cell(4, auroc=4) | {"kind": "uniform", "prune": 4}, *new,
    ]  # fmt: skip
    assert found["commits"] == ["a", "b"] and "commit" not in found
    assert (found["date"], found["note"]) == ("now", "busy")


def test_a_first_result_is_as_it_is():
    found = joined({}, {"commit": "b"}, [cell(1)])
    assert found == {"commit": "b", "cells": [cell(1)]}


def test_more_of_the_same_rule():
    before = {"commit": "a", "cells": [cell(1, prune=1)]}
    found = joined(before, {"commit": "b"}, [cell(2, prune=2)])
    assert found == {"commits": ["a", "b"], "cells": [cell(1, prune=1), cell(2, prune=2)]}
