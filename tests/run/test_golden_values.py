"""Values, audits and every way to compute them are what they were when they were last verified."""

import json

import numpy as np
import pytest

from helpers import golden

EXPECTED = json.loads(golden.FILE.read_text())
TOLERANCE = 1e-9  # of the largest number of a list; rounding is far below, on any processor


@pytest.mark.parametrize("training", ["bitwise", "fast"])
@pytest.mark.parametrize("optimizer", golden.OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "form"), [(model, form) for model in golden.MODELS for form in golden.forms(model)]
)
def test_values_and_audits_are_what_they_were(model, form, optimizer, training):
    found = dict(golden.numbers_of(golden.watched(model, optimizer, form, training)))
    prefix = f"{model} {optimizer} "
    expected = {k[len(prefix) :]: v for k, v in EXPECTED.items() if k.startswith(prefix)}
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        scale = np.abs(numbers).max()
        assert scale > 0, name
        np.testing.assert_allclose(
            found[name], numbers, rtol=0, atol=TOLERANCE * scale,
            err_msg=f"{prefix}{name}: if the change is meant, run python tests/helpers/golden.py",
        )  # fmt: skip


def test_the_file_has_no_model_or_optimizer_that_is_not_compared():
    known = {f"{model} {optimizer}" for model in golden.MODELS for optimizer in golden.OPTIMIZERS}
    assert {" ".join(name.split()[:2]) for name in EXPECTED} == known
