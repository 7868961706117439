"""Pass a file of variants, ours or another's, through the filter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inrun.variants.files import VariantsError, read_rows, read_sources
from inrun.variants.filters import REASONS, WINDOWS, Window, sift
from inrun.variants.prompts import CATEGORIES
from inrun.variants.tokens import Names, forbidden_tokens


def check(
    path: Path, names: Names, windows: Mapping[str, Window] = WINDOWS, k: int = 3
) -> dict[str, Any]:
    """How many variants of each category pass, which do not and why, which sources are complete."""
    sources = read_sources(path)
    categories = {c: {"variants": 0, "pass": 0} | dict.fromkeys(REASONS, 0) for c in CATEGORIES}
    dropped: list[dict[str, Any]] = []
    short: list[dict[str, Any]] = []
    for source, (number, row) in zip(sources, read_rows(path), strict=True):
        given = {c: row.get(c, []) for c in CATEGORIES}
        for category, texts in given.items():
            if not isinstance(texts, list):
                raise VariantsError(f"{path}, line {number}: {category} is not a list of strings")
            categories[category]["variants"] += len(texts)
        sifted = sift(source.z_star, given, forbidden_tokens(source.z_star, names), windows)
        for category, texts in sifted.kept.items():
            categories[category]["pass"] += len(texts)
        for drop in sifted.dropped:
            categories[drop.category][drop.reason] += 1
            dropped.append({"id": source.id, **drop._asdict()})
        if missing := sifted.missing(k):
            short.append({"id": source.id, "lacks": missing})
    return {
        "sources": len(sources),
        "complete": len(sources) - len(short),
        "k": k,
        "entities": names.label,
        "windows": dict(windows),
        "categories": categories,
        "dropped": dropped,
        "short": short,
    }
