"""From the curves of the parts to what is shown: losses at matched steps and at matched epochs."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.common.markdown import heading, row
from experiments.common.parts import Results
from experiments.common.statistics import interval, shown

LATE = 0.4  # of the training: "the middle and later stages"


def summarise(results: Results) -> dict[str, Any]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for r in results.values():
        kinds.setdefault(r["kind"], []).append(r)
    return {kind: one(runs) for kind, runs in kinds.items()}


def one(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All seeds of one corpus."""
    first = runs[0]
    about = {k: first[k] for k in ("model", "examples", "removed", "steps", "batch", "length")}
    curves = {k: np.array([r["curves"][k] for r in runs]) for k in first["curves"]}
    at = np.array(first["at"])
    # one epoch of what is kept is shorter: so many steps are the full training's epochs
    same_epochs = round(first["steps"] * (1 - first["removed"] / first["examples"]))
    column = int(np.abs(at - same_epochs).argmin())
    late = at >= LATE * first["steps"]
    settings = {}

    def ends(name: str) -> dict[str, np.ndarray]:
        """The losses of all seeds when the steps, and when the epochs, are as many."""
        return {k: curves[name][:, i] for k, i in (("steps", -1), ("epochs", epoch_end(name)))}

    def epoch_end(name: str) -> int:
        return -1 if name == "full" else column

    for name, curve in curves.items():
        own = ends(name)
        versus = {
            other: {end: interval(x - ends(other)[end]) for end, x in own.items()}
            for other in ("full", "random20")
            if other != name
        }
        settings[name] = {
            **band(curve),
            "beside_random": band(curve - curves["random20"]),
            "loss": {end: interval(x) for end, x in own.items()},
            "versus": versus,
            "lower_late": {
                other: float((curve[:, late] < curves[other][:, late]).mean()) for other in versus
            },
            "spoilt": float(np.mean([r["spoilt"][name] for r in runs])),
        }
    return about | {
        "seeds": [r["seed"] for r in runs], "void": sum(r["void"] for r in runs),
        "at": first["at"], "epochs_at": int(at[column]),
        "spoilt": first["spoilt"]["all"], "settings": settings,
        "overlap": {k: float(np.mean([r["overlap"][k] for r in runs])) for k in first["overlap"]},
    }  # fmt: skip


def band(curve: np.ndarray) -> dict[str, list[float]]:
    """Mean, lowest and highest over seeds [S, points]."""
    found = {"mean": curve.mean(0), "low": curve.min(0), "high": curve.max(0)}
    return {k: [round(float(x), 5) for x in v] for k, v in found.items()}


def headline(summary: dict[str, Any]) -> str:
    lines = []
    for kind, s in summary.items():
        lines.append(f"{kind}: {s['model']}, {s['examples']:,} sequences, {s['steps']} steps")
        for name, c in s["settings"].items():
            versus = c["versus"].get("random20")
            extra = f"  against random20 {signed(versus['steps'])}" if versus else ""
            lines.append(f"  {name:18} {shown(c['loss']['steps'])}{extra}")
    return "\n".join(lines)


def signed(cell: dict[str, Any], digits: int = 4) -> str:
    """A difference with its interval."""
    text = f"{cell['mean']:+.{digits}f}"
    if cell["low"] is not None:
        text += f" [{cell['low']:+.{digits}f}, {cell['high']:+.{digits}f}]"
    return text


def table(committed: dict[str, Any]) -> str:
    lines = heading(
        "size", "corpus", "trained on", "loss, same steps", "against random20, same steps",
        "against full, same steps", "against full, same epochs",
        f"lower than full / random20 from {LATE:.0%} of the steps on", "shuffled ones removed",
    )  # fmt: skip
    for size, data in committed.items():
        for kind, s in data["summary"].items():
            for name, c in s["settings"].items():
                full, rand = (c["versus"].get(k) for k in ("full", "random20"))
                late = (
                    f"{c['lower_late'][k]:.0%}" if k in c["lower_late"] else "–"
                    for k in ("full", "random20")
                )  # fmt: skip
                spoilt = f"{c['spoilt'] / s['spoilt']:.0%}" if s["spoilt"] else "–"
                cells = (
                    size, kind, name, shown(c["loss"]["steps"]),
                    signed(rand["steps"]) if rand else "–",
                    signed(full["steps"]) if full else "–",
                    signed(full["epochs"]) if full else "–", " / ".join(late), spoilt,
                )  # fmt: skip
                lines.append(row(*cells))
    return "\n".join(lines)
