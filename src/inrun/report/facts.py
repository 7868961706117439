"""The headline numbers of a run, for `inrun info` and for the report's cards."""

from __future__ import annotations

from typing import Any

import pandas as pd

from inrun.ledger.audits import audit_summary, carry_summary
from inrun.ledger.saved import SavedRun
from inrun.ledger.signals import WHOLE, Window
from inrun.report.noise import in_words, noise_of


def facts_of(saved: SavedRun, estimator: str | None = None) -> dict[str, Any]:
    """The headline numbers of a run."""
    return collect(saved, saved.values(estimator), saved.steps(estimator), estimator)


def collect(
    saved: SavedRun, values: pd.DataFrame, steps: pd.DataFrame, estimator: str | None,
    window: Window = WHOLE,
) -> dict[str, Any]:  # fmt: skip
    """The same from tables that were already asked for."""
    coverage = saved.info.get("coverage")
    return {
        "estimator": estimator or saved.estimators[0],
        "estimators": saved.estimators,
        "targets": saved.targets,
        "examples": len(values),
        "never_scored": int(values["value"].isna().sum()),
        "steps": len(steps),
        "scored_steps": int(steps["sum"].notna().sum()),
        "void_steps": int(steps["void"].notna().sum()),
        "records": int(values["scored"].sum()),
        "sum_of_values": float(values["value"].sum()),
        "coverage": coverage.get("share") if isinstance(coverage, dict) else None,
        "bytes": saved.bytes,
        **audit_summary(steps),
        "carry": carry_summary(steps),
        "sampled_steps": int(steps["bend"].notna().sum()),
        "bend": _last(steps["bend"]),
        **noise_of(saved, estimator, values, window),
    }


def _last(x: pd.Series[float]) -> float | None:
    """The last number of a column, if there is one."""
    known = x.dropna()
    return float(known.iloc[-1]) if len(known) else None


def describe(f: dict[str, Any]) -> dict[str, str]:
    """What ``inrun info`` prints."""
    never = f" ({f['never_scored']:,} never scored)" if f["never_scored"] else ""
    names = ", ".join(f["targets"][:12]) + (", ..." if len(f["targets"]) > 12 else "")
    text = {
        "examples": f"{f['examples']:,}{never}",
        "steps": f"{f['steps']:,} ({f['scored_steps']:,} scored, {f['void_steps']:,} void)",
        "records": f"{f['records']:,} per target and estimator, {f['bytes'] / 1e6:.1f} MB",
        "targets": f"{len(f['targets'])}: {names}",
        "estimators": ", ".join(f["estimators"]),
        "sum of values": f"{f['sum_of_values']:.4g} ({f['estimator']})",
    }
    if f["sampled_steps"]:
        text["first steps"] = (
            f"orders of the examples were sampled in {f['sampled_steps']:,} steps; in the last of "
            f"them the secant was off by {f['bend']:.2%}"
        )
    if f["carry"]:
        text |= _carried(f)
    elif f["audited"]:
        text |= {
            "explained": f"{f['explained']:.1%} of the batch share",
            "batch share": f"{f['batch_share']:.4g} over {f['audited']:,} audited steps",
            "momentum share": f"{f['momentum_share']:.4g}, credited to nobody",
            **_nobody(f),
            "residual": f"{f['residual']:.4g}",
        }
    else:
        text["explained"] = "not audited (audit_every)"
    if f["validation"] is not None:
        text["validation"] = f["validation"]
    text["steadiness"] = in_words(f)
    if f["coverage"] is not None:
        text["coverage"] = f"{f['coverage']:.1%} of the parameters scored"
    return text


def _carried(f: dict[str, Any]) -> dict[str, str]:
    """Does everything add up, where momentum is credited, too?"""
    c = f["carry"]
    text = {
        "loss drop": f"{c['drop']:.4g} along all steps",
        "credited": f"{c['credited']:.4g} to examples ({_of(c['credited'], c['drop'])})",
        "decay": f"{c['decay']:.4g}, decoupled weight decay",
        "older": f"{c['older']:.4g}, credited to nobody: older than the window",
    }
    if c["nobody"]:
        text["nobody's part"] = f"{c['nobody']:.4g}"
    if f["audited"]:
        text["explained"] = f"{f['explained']:.1%} of the drop measured in {f['audited']:,} steps"
        text["residual"] = f"{f['residual']:.4g}"
    return text


def _of(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "of nothing"


def _nobody(f: dict[str, Any]) -> dict[str, str]:
    """Nobody's part of the batch share, where there is one."""
    return {"nobody's part": f"{f['nobody']:.4g}, of the batch share"} if f["nobody"] else {}


def cards(f: dict[str, Any]) -> list[dict[str, str]]:
    """The report's headline: name, number, note."""
    never = f"{f['never_scored']:,} never scored" if f["never_scored"] else "all of them scored"
    steps = [f"{f['scored_steps']:,} scored"]
    if f["void_steps"]:
        steps.append(f"{f['void_steps']:,} void")
    if f["audited"]:
        steps.append(f"{f['audited']:,} audited")
    found = [
        _card("Examples", f"{f['examples']:,}", never),
        _card("Steps", f"{f['steps']:,}", ", ".join(steps)),
    ]
    if f["carry"]:
        found += _carry_cards(f)
    elif f["audited"]:
        found += _audit_cards(f)
    else:
        found.append(_card("Explained", "–", "no audited steps on record"))
    found.append(_steady_card(f))
    if f["coverage"] is not None:
        found.append(_card("Coverage", f"{f['coverage']:.1%}", "of the parameters scored"))
    return found


def _card(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _steady_card(f: dict[str, Any]) -> dict[str, str]:
    """How far would the ranking agree with one by as many other validation rows?"""
    if f["steadiness"] is None:
        return _card("Steadiness", "–", in_words(f))
    note = "of the rankings, from halves of the validation set"
    if f["halves_agree"] is None:
        note = f"± {f['steadiness_error']:.2f}, agreement with a ranking by as many other rows"
    return _card("Steadiness", f"{f['steadiness']:.2f}", note)


def _carry_cards(f: dict[str, Any]) -> list[dict[str, str]]:
    """Where the loss drop went, momentum included."""
    c = f["carry"]
    what = f"of the loss drop of {c['drop']:.3g} is in the values, momentum included"
    found = [
        _card("Credited", _of(c["credited"], c["drop"]), what),
        _card("Decay", f"{c['decay']:.3g}", "weight decay's part"),
        _card("Older", f"{c['older']:.3g}", "older than the window, credited to nobody"),
    ]
    if f["audited"]:
        note = f"of the drop measured in {f['audited']:,} steps is in the sum"
        found.append(_card("Explained", f"{f['explained']:.1%}", note))
    return found


def _audit_cards(f: dict[str, Any]) -> list[dict[str, str]]:
    """What the batches of the audited steps did, and what momentum did."""
    drop = f["batch_share"] + f["momentum_share"]
    whole, rest = "taken off the loss by the batches", "credited to nobody"
    if min(f["batch_share"], f["momentum_share"]) >= 0 < drop:  # parts of one whole
        whole = f"{f['batch_share'] / drop:.0%} of the loss change"
        rest = f"{f['momentum_share'] / drop:.0%}, credited to nobody"
    elif f["momentum_share"] < 0:
        rest = "given back, credited to nobody"
    in_values = "of the batch share is in the values" + (" and nobody's part" * bool(f["nobody"]))
    return [
        _card("Explained", f"{f['explained']:.1%}", in_values),
        _card("Batch share", f"{f['batch_share']:.3g}", whole),
        _card("Momentum share", f"{f['momentum_share']:.3g}", rest),
    ]
