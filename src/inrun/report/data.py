"""The content of the report as numbers and strings, without markup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from inrun.ledger.saved import SavedRun
from inrun.ledger.signals import WHOLE, Window, change_name, shown_names
from inrun.ledger.suspects import SURE, by_values
from inrun.report.answers import section
from inrun.report.examples import load_examples, load_tokens
from inrun.report.facts import cards, collect
from inrun.report.noise import in_words
from inrun.report.tokens import Tokenizer, shaded

SHOWN = 200  # best, worst and suspects that come with their text or image, each
ROWS = 150_000  # examples that the report lists; a sample of more
TEXT = 1500  # characters of a text; the rest is cut, with a note
POINTS = 600  # of a line
GROUPS = 40  # rows of a table by label or group, columns of the heat map
BINS = 61
EPOCHS = 100


def payload(
    saved: SavedRun,
    examples: str | Path | None = None,
    estimator: str | None = None,
    tokenizer: Tokenizer | None = None,
    answers: Path | None = None,
    window: Window = WHOLE,
) -> dict[str, Any]:
    """Everything the page needs, ready for JSON; values, harm and suspects of the ``window``."""
    steps = saved.steps(estimator)
    keys = {t: f"target {q}" for q, t in enumerate(saved.targets)}  # one may be called "label"
    values = _values(saved, estimator, keys, window)
    best, worst, harmful = _lists(values)
    suspects, visits, said = _suspects(saved, estimator, values, harmful, window)
    shown = np.unique(np.concatenate([best, worst, suspects]))
    content = pd.DataFrame(columns=["text", "image"])
    values["label"], values["group"] = None, None
    if examples is not None and len(values):
        ids = values["id"].tolist()
        frame = load_examples(examples, ids, show={ids[i] for i in shown}).set_index("id")
        frame = frame.reindex(ids).reset_index(drop=True)
        content = frame[["text", "image"]]
        values["label"], values["group"] = frame["label"], frame["group"]
    listed = np.arange(len(values))
    if len(values) > ROWS:
        others = np.setdiff1d(listed, shown)
        chosen = np.random.default_rng(0).choice(others, ROWS - len(shown), replace=False)
        listed = np.sort(np.concatenate([shown, chosen]))
    where = {int(row): k for k, row in enumerate(listed)}
    lists = {"best": best, "worst": worst, "suspects": suspects}
    facts = collect(saved, values, steps, estimator, window)
    return {
        "title": saved.path.resolve().name,
        "about": [*_about(saved, facts), _only(window)],
        "cards": cards(facts),
        "targets": saved.targets,
        "examples": len(values),
        "columns": _columns(values.iloc[listed], saved.targets),
        "window": visits,
        "values_said": said,
        "epochs": _epochs(saved.epochs(estimator)),
        "lists": {name: [where[int(i)] for i in rows] for name, rows in lists.items()},
        "content": {str(where[int(i)]): c for i in shown if (c := _content(content, int(i)))},
        "steady": in_words(facts),
        "histogram": _histogram(values["value"].dropna().to_numpy()),
        "audit": _audit(steps),
        "answers": section(saved, answers, examples, tokenizer),
        "tokens": shaded(saved, estimator, tokenizer, partial(_tokens, examples)),
        "by": {name: t for name in ("group", "label") if (t := _by(values, name))},
        "heat": [h for name in ("group", "label") if (h := _heat(values, keys, name))],
    }


def _values(
    saved: SavedRun, estimator: str | None, keys: dict[str, str], window: Window
) -> pd.DataFrame:
    """Values and harm; targets have their ``keys`` as names."""
    since, until, half_life = window.since, window.until, window.half_life
    values = saved.values(estimator, since=since, until=until, half_life=half_life)
    values = values.rename(columns={t: k for t, k in keys.items() if len(keys) > 1})
    return values.merge(saved.harm(estimator, since=since, until=until), on="id", how="left")


def _tokens(examples: str | Path | None, ids: Any) -> Any:
    return {} if examples is None else load_tokens(examples, ids)


def _about(saved: SavedRun, facts: dict[str, Any]) -> list[str]:
    info = saved.info
    model = info.get("model")
    names = [model.get("class") if isinstance(model, dict) else model]
    optimizer = info.get("optimizer")
    names.append(optimizer.get("class") if isinstance(optimizer, dict) else optimizer)
    Q = len(saved.targets)
    return [
        *(str(n) for n in names if n),
        f"{facts['estimator']} values",
        f"{Q} target{'s' if Q > 1 else ''}",
        *([str(facts["validation"])] if facts["validation"] else []),
        str(info.get("created", ""))[:10],
    ]


def _lists(values: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of the best, the worst and the most harmful, best first in each sense."""
    value, harm = values["value"].to_numpy(), values["harm"].to_numpy()
    scored = np.flatnonzero(~np.isnan(value))
    order = scored[np.argsort(-value[scored], kind="stable")]
    judged = np.flatnonzero(~np.isnan(harm))
    suspects = judged[np.argsort(-harm[judged], kind="stable")]
    return order[:SHOWN], order[::-1][:SHOWN], suspects[:SHOWN]


def _suspects(
    saved: SavedRun, estimator: str | None, values: pd.DataFrame, harmful: np.ndarray,
    window: Window,
) -> tuple[np.ndarray, dict[str, Any] | None, str]:  # fmt: skip
    """Positions of the most suspicious, the visits that the ranking is made of, and what values
    say about it; the most harmful where the run has no signals."""
    loss = shown_names(saved.targets)[0]
    if loss not in values or values[loss].isna().all():
        return harmful, None, ""
    ranked = saved.suspects(estimator, since=window.since, until=window.until)
    at = pd.Series(np.arange(len(values)), index=values["id"])
    visits, sure = ranked.attrs["window"], int((ranked["confidence"] >= SURE).sum())
    said = f"By their {by_values(visits, sure)}."
    return at.reindex(ranked["id"].head(SHOWN)).to_numpy(), visits, said


def _only(window: Window) -> str:
    """What the page says of a window."""
    parts = [] if window.since is None else [f"from step {window.since:,} on"]
    parts += [] if window.until is None else [f"before step {window.until:,}"]
    if window.half_life is not None:
        parts.append(f"half for each {window.half_life:g} steps of age")
    return f"values only {', '.join(parts)}" if parts else ""


def _epochs(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One row per epoch, the last ones if there are many; nothing of a run of one."""
    rows = table.tail(EPOCHS).to_dict("records") if len(table) > 1 else []
    return [{str(k): None if pd.isna(x) else float(x) for k, x in row.items()} for row in rows]


def _columns(rows: pd.DataFrame, targets: Sequence[str]) -> dict[str, Any]:
    ids = rows["id"].tolist()
    if any(isinstance(x, int) and abs(x) > 2**53 for x in ids):
        ids = [str(x) for x in ids]  # beyond what JavaScript counts exactly
    columns: dict[str, Any] = {
        "id": [x if isinstance(x, int) else _cut(x, 200)[0] for x in ids],
        "value": _numbers(rows["value"]),
        "harm": _numbers(rows["harm"]),
        "steps": rows["steps"].tolist(),
    }
    signals = {"loss": shown_names(targets)[0], "change": change_name(targets)}
    for key, name in signals.items():
        if name in rows and rows[name].notna().any():
            columns[key] = _numbers(rows[name])
    for name in ("label", "group"):
        if rows[name].notna().any():
            codes, names = pd.factorize(rows[name].astype(object), use_na_sentinel=True)
            columns[name] = codes.tolist()
            columns[name + "_names"] = [_cut(str(x), 100)[0] for x in names]
    return columns


def _numbers(column: pd.Series) -> list[float | None]:
    """Five digits: enough to read and to sort by."""
    return [None if np.isnan(x) else float(f"{x:.5g}") for x in column.to_numpy()]


def _content(content: pd.DataFrame, i: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if i < len(content):
        text, image = content["text"].iloc[i], content["image"].iloc[i]
        if isinstance(image, str):
            found["image"] = image
        if isinstance(text, str):
            found["text"], cut = _cut(text, TEXT)
            if cut:
                found["length"] = cut
    return found


def _cut(text: str, limit: int) -> tuple[str, int]:
    """The first characters, and the true length if that was not all."""
    clean = text[:limit].encode("utf-8", "replace").decode()
    return (clean, 0) if len(text) <= limit else (clean + "…", len(text))


def _histogram(x: np.ndarray) -> dict[str, Any] | None:
    """Counts between the 0.5 % and 99.5 % quantiles, always with 0 inside; the rest at the ends."""
    if len(x) == 0:
        return None
    low, high = min(0.0, *np.quantile(x, [0.005])), max(0.0, *np.quantile(x, [0.995]))
    low, high = (low, high) if high > low else (low - 1.0, high + 1.0)
    width = (high - low) / BINS
    left = int(np.ceil(-low / width - 1e-9))  # a bin edge falls on 0: no bar mixes signs
    edges = (np.arange(left + int(np.ceil(high / width - 1e-9)) + 1) - left) * width
    counts = np.histogram(np.clip(x, edges[0], edges[-1]), edges)[0]
    return {
        "edges": [float(f"{e:.5g}") for e in edges],
        "counts": counts.tolist(),
        "outside": [int((x < edges[0]).sum()), int((x > edges[-1]).sum())],
        "negative": int((x < 0).sum()),
        "n": len(x),
        "median": float(np.median(x)),
    }


def _audit(steps: pd.DataFrame) -> dict[str, Any] | None:
    audited = steps[steps["batch_share"].notna() & steps["sum"].notna()]
    if len(audited) < 2:
        return None
    keep = np.unique(
        np.linspace(0, len(audited) - 1, min(POINTS, len(audited))).round().astype(int)
    )
    series: dict[str, Any] = {"step": audited["step"].to_numpy()[keep].tolist()}
    series["loss"] = _numbers(audited["loss"].iloc[keep])
    nobody = ("nobody",) if audited["nobody"].any() else ()
    names = {name: audited[name] for name in ("sum", *nobody, "batch_share", "momentum_share")}
    if audited["drop"].notna().all():  # "carry": the whole step is credited
        whole = audited["batch_share"] + audited["momentum_share"]
        names = {"whole": whole, "drop": audited["drop"], "decay": audited["decay"]}
    for name, column in (names | {"residual": audited["residual"]}).items():
        series[name] = _numbers(column.cumsum().iloc[keep])
    return series | {"audited": len(audited), "steps": len(steps)}


def _by(values: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    """One row per label or group: how many, their mean value and harm, how many hurt."""
    rows = values[values[name].notna() & values["value"].notna()]
    if rows.empty:
        return []
    grouped = rows.groupby(rows[name].astype(str))
    table = grouped.agg(n=("value", "size"), mean=("value", "mean"), harm=("harm", "mean"))
    table["hurt"] = grouped["value"].agg(lambda v: float((v < 0).mean()))
    table = table.nlargest(GROUPS, "n").sort_values("mean", ascending=False)
    return [
        {
            "name": _cut(str(key), 100)[0],
            "n": int(row["n"]),
            "mean": float(row["mean"]),
            "hurt": float(row["hurt"]),
            "harm": None if np.isnan(row["harm"]) else float(row["harm"]),
        }
        for key, row in table.iterrows()
    ]


def _heat(values: pd.DataFrame, targets: dict[str, str], name: str) -> dict[str, Any] | None:
    """Mean value of each group (or label) on each target."""
    rows = values[values[name].notna() & values["value"].notna()]
    if rows.empty or len(targets) < 2:
        return None
    key = rows[name].astype(str)
    common = key.value_counts().head(GROUPS).index
    order = sorted(common, key=_natural)
    shown = list(targets)[:GROUPS]
    mean = rows.groupby(key)[[targets[t] for t in shown]].mean().loc[order]
    return {
        "by": name,
        "rows": [_cut(x, 60)[0] for x in order],
        "columns": [_cut(x, 60)[0] for x in shown],
        "mean": [_numbers(mean.iloc[i]) for i in range(len(mean))],
        "left_out": [int(key.nunique() - len(order)), len(targets) - len(shown)],
    }


def _natural(x: str) -> tuple[int, float, str]:
    try:
        return (0, float(x), x)
    except ValueError:
        return (1, 0.0, x)
