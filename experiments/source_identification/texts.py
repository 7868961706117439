"""The search problem: candidate sentences, and queries that each come from one of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATEGORIES = {  # in the files of `inrun variants`: name in the paper's Table 2
    "exact": "Exact",
    "partial_same": "Partial",
    "paraphrase": "Paraphrase",
    "significant_paraphrase": "Significant rewrite",
    "similar_topic": "Similar topic",
}
Row = dict[str, Any]  # a line of variants.jsonl: id, z_star and texts by category


@dataclass(frozen=True)
class Query:
    source: int  # the place of its true source among the candidates
    category: str
    text: str


@dataclass(frozen=True)
class Problem:
    candidates: list[str]
    queries: list[Query]


def problem(settings: dict[str, Any], data: Path | None) -> Problem:
    """``candidates`` sentences: ``sources`` sources and a random rest. The queries are the sources'
    variants, where ``shard`` is [i, n] those of every n-th source from the i-th on; where ``asked``
    gives a number for some categories, only the first of each of so many of these sources."""
    texts, rows = semantic(data) if data is not None else documentation()
    chance = random.Random(settings["seed"])
    wanted, sources = settings["candidates"], settings["sources"]
    if wanted > len(texts) or not sources <= min(len(rows), wanted):
        raise ValueError(
            f"{wanted:,} candidates with {sources} sources are wanted; there are {len(texts):,} "
            f"sentences, {len(rows)} of them sources: pass --data DIR with semantic/candidates.txt "
            "and semantic/variants.jsonl (experiments/README.md says what they hold)"
        )
    chosen = [rows[r] for r in sorted(chance.sample(range(len(rows)), sources))]
    own = {row["id"] for row in chosen}
    rest = [i for i in range(len(texts)) if i not in own]
    kept = sorted([*own, *chance.sample(rest, wanted - len(own))])
    place = {i: k for k, i in enumerate(kept)}
    first, step = settings.get("shard", [0, 1])
    asked = settings.get("asked")
    queries = [
        Query(place[row["id"]], category, text)
        for number, row in enumerate(chosen[first::step])
        for category in CATEGORIES
        for text in variants(
            row, category, None if asked is None else number < asked.get(category, 0)
        )
    ]
    return Problem([texts[i] for i in kept], queries)


def variants(row: Row, category: str, one: bool | None) -> list[str]:
    """All texts of a category, or the first of them, or none."""
    found = [row["z_star"]] if category == "exact" else row[category]
    return found if one is None else found[: int(one)]


def semantic(data: Path) -> tuple[list[str], list[Row]]:
    folder = data / "semantic"
    missing = [f for f in ("candidates.txt", "variants.jsonl") if not (folder / f).exists()]
    if missing:
        raise ValueError(
            f"{folder / missing[0]} is missing: put the candidates there, one sentence per line, "
            "and their variants (`inrun variants` makes them); or leave --data out"
        )
    texts = (folder / "candidates.txt").read_text("utf-8").splitlines()
    lines = (folder / "variants.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    for row in rows:
        if row["id"] >= len(texts) or texts[row["id"]] != row["z_star"]:
            raise ValueError(
                f"{folder / 'variants.jsonl'}: the source {row['id']} is not that line (from 0) of "
                "candidates.txt: the files do not belong together"
            )
    return texts, rows


def documentation() -> tuple[list[str], list[Row]]:
    """Sentences of CPython's documentation. Every tenth is a source; its variants are mechanical,
    and on its topic are the three sentences that follow it, which are no candidates."""
    texts: list[str] = []
    rows: list[Row] = []
    group: list[str] = []
    for sentence in sentences():
        group.append(sentence)
        if len(group) == 10:
            rows.append(mechanical(len(texts), group[0], group[1:4]))
            texts += [group[0], *group[4:]]
            group = []
    return texts, rows


def sentences() -> Iterator[str]:
    from pydoc_data.topics import topics

    seen = set[str]()
    for text in topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            for found in re.split(r"(?<=[a-z)]\.)\s+", " ".join(paragraph.split())):
                plain = re.fullmatch(r"[A-Z][\w\s,;:()'\"*-]+\.", found)
                if plain and 8 <= len(found.split()) <= 30 and found not in seen:
                    seen.add(found)
                    yield found


def mechanical(place: int, text: str, neighbours: Sequence[str]) -> Row:
    """Cut short; every fourth word dropped; only every third kept, from the end to the front."""
    words = text.split()
    return {
        "id": place,
        "z_star": text,
        "partial_same": [" ".join(words[: max(4, len(words) * 3 // 4)])],
        "paraphrase": [
            " ".join(w for i, w in enumerate(words) if i % 4 != k) for k in range(3)
        ],
        "significant_paraphrase": [" ".join(words[k::3][::-1]) for k in range(3)],
        "similar_topic": list(neighbours),
    }  # fmt: skip
