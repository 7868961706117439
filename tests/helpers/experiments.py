"""One experiment at its smallest size."""

from dataclasses import replace

import pytest

from experiments import load
from experiments.common.parts import reproduce

pytest.importorskip("sklearn", reason="needs the extra inrun[experiments]")
pytest.importorskip("matplotlib", reason="needs the extra inrun[experiments]")


def run(name, folder):
    """The summary at size tiny; then again from the finished parts, with tables and figures."""
    experiment = load(name)
    said = []
    found = reproduce(experiment, "tiny", folder, device="cpu", show=said.append)
    assert found["missing"] == [] and experiment.claim in said[0]

    def again(*_):
        raise AssertionError("a finished part was done again")

    second = reproduce(
        replace(experiment, measure=again), "tiny", folder, device="cpu", show=said.append
    )
    assert second == found
    committed = {"smoke": found, "paper": found}
    for table in experiment.tables.values():
        text = table(committed)
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, text
    for name, figure in experiment.figures.items():
        figure(committed).savefig(folder / name)
    return found["summary"]
