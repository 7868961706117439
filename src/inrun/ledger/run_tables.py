"""The tables of a run, live or read from disk, as users ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from inrun.ledger import LedgerError
from inrun.ledger.audits import AUDITED, FORECASTS
from inrun.ledger.entries import Ledger
from inrun.ledger.signals import Window
from inrun.ledger.steady import Steadiness


class RunTables:
    """The tables of a run, live or read from disk. Estimators go by name; None is the first."""

    _ledger: Ledger
    _names: Sequence[str]  # of the estimators

    def _settled(self) -> Ledger:
        """Returns the ledger when everything that was recorded is in it."""
        return self._ledger

    def _index(self, estimator: str | None) -> int:
        """Returns the position of an estimator in the run's list."""
        if estimator is None:
            return 0
        if estimator not in self._names:
            raise LedgerError(
                f"estimator {estimator!r} was not recorded; this run has {', '.join(self._names)}"
            )
        return list(self._names).index(estimator)

    def values(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None,
        half_life: float | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """One row per example: id, value (the mean over targets), one column per named target,
        and how often it was seen (``steps``) and scored. Never scored is NaN. Where the training
        loss is a classification loss, loss, EL2N and margin as means over the visits, and
        ``loss_change``, the loss at the last visit minus that at the first.

        Only of the steps since ≤ step < until, where these are given: an example that was not seen
        there has no row. ``half_life``: values of older steps count less, half for each so many
        steps. ``epochs()`` has the steps of each epoch.
        """
        window = Window(since, until, half_life)
        return self._settled().values(self._index(estimator), window)

    def history(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None
    ) -> pd.DataFrame:
        """One row per scored step and example: step, id, value, one column per named target, and
        loss, EL2N and margin where known. ``since``, ``until``: only these steps."""
        return self._settled().history(self._index(estimator), Window(since, until))

    def harm(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None
    ) -> pd.DataFrame:
        """One row per example: id, harm: how often and how far it was among the harmful of its
        batch, summed over steps and targets. Says whom it hurt; see docs/method.md."""
        window = Window(since, until)
        return self._settled().harm(self._index(estimator), window=window)

    def epochs(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per epoch: its steps (``since`` ≤ step < ``until``), visits (``examples``), the
        sum of values and the means of loss, EL2N and margin. A step is of epoch k if half of its
        examples or more have been seen k times before."""
        return self._settled().epochs(self._index(estimator))

    def suspects(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None,
        values: bool = True,
    ) -> pd.DataFrame:  # fmt: skip
        """One row per example, the most suspicious label first: id, suspicion, confidence,
        disagreed, the means of loss, EL2N and margin over a window of visits, visits, label and,
        with several targets, the target whose loss its values raised most (``hurts``).

        ``suspicion`` is the share of examples that are no more suspicious: ranked by how badly the
        model fitted them, more so in labels whose badly fitted examples were harmful, and by harm
        where one label stands out or where hard examples help (docs/method.md). ``confidence``: of
        the examples up to this one at least this share is wrong, as their values say; NaN without
        values. ``disagreed`` is the share of the visits at which the model preferred another label:
        no probability that the label is wrong, a hard example looks the same.
        ``values=False``: by the fit alone, where validation labels are not to be trusted or of
        another kind of data. The window is chosen by what the run shows, unless ``since`` or
        ``until`` are given; ``suspects().attrs["window"]`` says which it is and why, and what the
        values said.
        """
        window = Window(since, until)
        return self._settled().suspects(self._index(estimator), window, values)

    def steadiness(
        self, estimator: str | None = None, *, since: int | None = None, until: int | None = None,
        half_life: float | None = None,
    ) -> Steadiness:  # fmt: skip
        """How far the ranking by ``values()`` would agree with one by as many other validation
        rows; ``print`` it. From values by two halves of the rows, which a sample of the steps has
        (``watch(..., halves_every=50)``), or all with ``targets=inrun.halves(...)``."""
        window = Window(since, until, half_life)
        return self._settled().steadiness(self._index(estimator), window, self._how_validated())

    def _how_validated(self) -> Any:
        """The section ``validation`` of run.json."""
        raise NotImplementedError

    def steps(self, estimator: str | None = None) -> pd.DataFrame:
        """One row per optimizer step: lr, sum of values, nobody's part, and where it was audited
        the loss, batch share, momentum share, residual and explained ratio (means over targets).
        For "carry" also how far the loss fell along the step (``drop``, by the gradient halfway)
        and weight decay's part of it; residual and explained then compare that with the whole
        measured drop. "influence" does not add up to a loss change: it has no audit."""
        index = self._index(estimator)
        found = self._settled().steps(index)
        if self._names[index].startswith(FORECASTS):
            found[list(AUDITED)] = np.nan
        return found

    def tokens(
        self, id: int | str | None = None, step: int | None = None, estimator: str | None = None
    ) -> pd.DataFrame:
        """One row per step and position of an example that was trained on in
        ``run.batch(ids, tokens=True)``: step, id, position, input (what the model received there,
        where it takes integers), value (the mean over targets), one column per named target.

        Without ``id`` or ``step``: of all of them. The values of an example's positions add up to
        its value in that step; the weight of ``every=k`` is not in them.
        """
        return self._settled().tokens(self._index(estimator), id, step)
