"""The filter of Appendix E: which candidates pass, why others do not, and which K are taken."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from inrun.variants.files import VariantsError
from inrun.variants.prompts import CATEGORIES, wanted
from inrun.variants.tokens import jaccard, words

Window = tuple[float, float]

# The paper names τ_p,min, τ_p,max and τ_s,max and gives no numbers; these are ours. They do not
# overlap, so a sentence belongs to one category only. Its partial_same has no window; a floor keeps
# unrelated sentences out.
WINDOWS: Mapping[str, Window] = {
    "partial_same": (0.4, 1.0),
    "paraphrase": (0.2, 0.8),
    "significant_paraphrase": (0.0, 0.2),
    "similar_topic": (0.0, 0.1),
}
FORBIDDING = ("significant_paraphrase", "similar_topic")
REASONS = ("not a sentence", "copy", "forbidden word", "overlap", "duplicate")
MIN_WORDS = 3

# A second sentence after a word of four letters or more: "St.", "Mr." and initials end none.
_BREAK = re.compile(r"([^\W\d_]{4,})[.?]+[\"'”’)\]]*\s+[\"'“‘(\[]*[A-Z]")
_ABBREVIATIONS = {"assn", "capt", "corp", "dept", "messrs", "prof"}


class Dropped(NamedTuple):
    category: str
    text: str
    reason: str  # one of REASONS
    detail: str


class Sifted(NamedTuple):
    kept: dict[str, list[str]]
    dropped: list[Dropped]

    def missing(self, k: int) -> dict[str, int]:
        """How many candidates each category lacks; empty when the source is complete."""
        lack = {c: wanted(c, k) - len(self.kept[c]) for c in CATEGORIES}
        return {c: n for c, n in lack.items() if n > 0}


def sift(
    z_star: str,
    candidates: Mapping[str, Sequence[Any]],
    forbidden: Collection[str],
    windows: Mapping[str, Window] = WINDOWS,
) -> Sifted:
    """Pass the candidates of a source, by category, through the filter.

    ``forbidden`` holds words in normal form (the keys of ``forbidden_tokens``). Duplicates differ
    in case or punctuation at most, within a source; the first one stays.
    """
    sifted = Sifted({c: [] for c in CATEGORIES}, [])
    source, seen = words(z_star), set()
    for category in CATEGORIES:
        for candidate in candidates.get(category, ()):
            text = clean(candidate) if isinstance(candidate, str) else ""
            said = words(text)
            why = _fault(category, text, said, source, forbidden, windows[category])
            if why is None and tuple(said) in seen:
                why = "duplicate", "said before"
            if why is None:
                seen.add(tuple(said))
                sifted.kept[category].append(text)
            else:
                shown = text if isinstance(candidate, str) else clean(repr(candidate))
                sifted.dropped.append(Dropped(category, shown, *why))
    return sifted


def _fault(
    category: str,
    text: str,
    said: list[str],
    source: list[str],
    forbidden: Collection[str],
    window: Window,
) -> tuple[str, str] | None:
    if len(said) < MIN_WORDS:
        return "not a sentence", f"fewer than {MIN_WORDS} words"
    if any(m[1].casefold() not in _ABBREVIATIONS for m in _BREAK.finditer(text)):
        return "not a sentence", "more than one sentence"
    if said == source:  # also for partial_same: the exact query is a scenario of its own
        return "copy", "the source itself"
    if category in FORBIDDING and (used := sorted({*said} & {*forbidden})):
        return "forbidden word", ", ".join(used)
    overlap = jaccard(said, source)
    if not window[0] <= overlap <= window[1]:
        side = "above" if overlap > window[1] else "below"
        return "overlap", f"Jaccard {overlap:.3f} {side} {window[overlap > window[1]]:g}"
    return None


def clean(text: str) -> str:
    """One line of printable text that every file and terminal can take."""
    valid = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
    return " ".join("".join(c if c.isprintable() else " " for c in valid).split())


def select(sifted: Sifted, k: int, seed: int) -> dict[str, list[str]]:
    """At most K per category, drawn by ``seed``; the order of the candidates is kept."""
    return {c: draw(sifted.kept[c], wanted(c, k), seed) for c in CATEGORIES}


def draw(items: Iterable[str], n: int, seed: int) -> list[str]:
    """Returns ``n`` items at random; the choice depends only on ``seed`` and the item itself."""
    pool = list(items)
    order = sorted(pool, key=lambda x: hashlib.sha256(f"{seed}\n{x}".encode()).digest())
    chosen = set(order[:n])
    return [x for x in pool if x in chosen]


def parse_windows(given: Iterable[str]) -> dict[str, Window]:
    """``WINDOWS`` with changes written as CATEGORY=LOW:HIGH."""
    windows = dict(WINDOWS)
    for text in given:
        category, _, bounds = text.partition("=")
        try:
            low, high = (float(x) for x in bounds.split(":"))
            if category not in CATEGORIES or not 0 <= low <= high <= 1:
                raise ValueError
        except ValueError:
            raise VariantsError(
                f"--window {text}: write CATEGORY=LOW:HIGH with 0 <= LOW <= HIGH <= 1, as "
                f"paraphrase=0.2:0.8; the categories are {', '.join(CATEGORIES)}"
            ) from None
        windows[category] = (low, high)
    return windows
