"""The benchmark of what influence costs: a try, and how a run is put together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import influence_cost


def test_costs_of_runs_follow_the_schedule(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    influence_cost.main(["gpt-1x32:2x4", "--steps", "5", "--out", str(out)])
    result = json.loads(out.read_text())["shapes"]["gpt-1x32:2x4"]
    assert result["trainings"]["plain"] == {"300": 1.0, "1000": 1.0, "10000": 1.0}
    assert {*result["seconds"]["both"]} == {"observed", "others"} and not result["remarks"]
    how = influence_cost.Sampling(4, 2, 3)
    assert influence_cost.observations(how, 20) == len({0, 1, 2, 3, 4, 6, 9, 12, 15, 18})
    assert [influence_cost.renewals(n, False) for n in (7, 8, 9, 10)] == [0, 1, 2, 3]
    assert [influence_cost.renewals(n, True) for n in (8, 9, 10, 13)] == [1, 1, 2, 3]
    result["seconds"] = {k: {"observed": 3.0, "others": 2.0} for k in result["seconds"]}
    result |= {"first_renewal": 8.0, "renewal": 4.0, "renewal_of_large": 5.0, "sampling": vars(how)}
    assert influence_cost.of_run(result, "secant", 20) == 1.0
    wanted = (10 * 3.0 + 10 * 2.0 + 8.0 + 2 * 4.0 + 5.0) / (20 * 2.0)
    assert influence_cost.of_run(result, "influence", 20) == wanted
