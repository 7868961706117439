"""``inrun variants`` without its options: what was found, how it looks, the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from inrun.variants import show
from inrun.variants.check import check
from inrun.variants.client import Endpoint
from inrun.variants.files import Source, VariantsError, read_sources
from inrun.variants.filters import draw, parse_windows
from inrun.variants.generate import Settings, generate
from inrun.variants.tokens import find_names


class Found(NamedTuple):
    facts: dict[str, Any]
    shown: Table
    code: int  # 1: some sources are short, had no reply or hold variants that do not pass


def check_variants(file: Path, entities: str, window: Iterable[str], k: int) -> Found:
    report = check(file, find_names(entities), parse_windows(window), k)
    return Found(
        report, show.checked(report, file), int(bool(report["dropped"] or report["short"]))
    )


def make_variants(
    sources: Path,
    output: Path,
    endpoint: Endpoint,
    *,
    k: int,
    seed: int,
    sample: int | None,
    entities: str,
    window: Iterable[str],
    request: str,
    **how: Any,
) -> Found:
    """``how``: the keyword arguments of ``generate``."""
    settings = Settings(k, seed, parse_windows(window), _object(request))
    texts = _sample(read_sources(sources), sample, seed)
    names = find_names(entities)
    with show.progress(endpoint.model) as watch:
        outcome = generate(texts, output, endpoint, names, settings, watch=watch, **how)
    facts = vars(outcome) | {"output": str(output), "entities": names.label}
    shown = show.summary(outcome, output, k, names.label)
    return Found(facts, shown, int(bool(outcome.short or outcome.failed)))


def _sample(sources: list[Source], n: int | None, seed: int) -> list[Source]:
    if n is None:
        return sources
    drawn = {*draw((repr(s.id) for s in sources), n, seed)}
    return [s for s in sources if repr(s.id) in drawn]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise VariantsError(f"--request {text}: write a JSON object, as '{{\"temperature\": 0.7}}'")
    return found
