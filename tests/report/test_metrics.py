"""Each measure against its well-known implementation, with ties."""

from __future__ import annotations

import numpy as np
import pytest

from inrun.report import metrics


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_metrics_agree_with_scipy_and_sklearn(seed, ties):
    stats = pytest.importorskip("scipy.stats")
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 50)) + rng.normal(size=50)
    if ties:
        a, b = a.round(0), b.round(0)
    y = rng.random(50) < 0.3
    y[:2] = True, False
    assert metrics.auroc(a, y) == pytest.approx(sklearn.roc_auc_score(y, a), abs=1e-12)
    assert metrics.pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-12)
    assert metrics.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    np.testing.assert_array_equal(metrics.ranks(a), stats.rankdata(a))


def test_precision_and_overlap_count_the_first_k():
    scores, bad = [5, 1, 4, 3], [True, False, False, True]
    assert metrics.precision_at_k(scores, bad, 1) == 1
    assert metrics.precision_at_k(scores, bad, 2) == 0.5
    assert metrics.bottom_overlap([1, 2, 3, 4], [1, 3, 2, 4], 2) == 0.5
    assert metrics.bottom_overlap([1, 2, 3, 4], [2, 1, 3, 4], 2) == 1


def test_metrics_refuse_bad_input():
    with pytest.raises(ValueError, match="one positive and one negative"):
        metrics.auroc([1, 2], [1, 1])
    with pytest.raises(ValueError, match="between 1 and the number of examples"):
        metrics.bottom_overlap([1, 2], [1, 2], 3)
    with pytest.raises(ValueError, match="NaN"):
        metrics.pearson([1, np.nan], [1, 2])
    with pytest.raises(ValueError, match="one per example"):
        metrics.pearson([1], [1, 2])
    assert np.isnan(metrics.pearson([1, 1], [1, 2]))
