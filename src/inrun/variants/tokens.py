"""Words, their overlap, and the tokens of a source that a distant variant must not repeat."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from inrun.variants.files import VariantsError

LONG = 8  # letters of a long word
ENTROPY = 2.5  # bits per letter of a high-entropy one
PIPELINE = "en_core_web_sm"

# What spaCy labels besides names. "seven", "that year" and "billion" may be said again; what has
# digits is forbidden as an identifier anyway.
NUMBERS = ("DATE", "TIME", "PERCENT", "MONEY", "QUANTITY", "ORDINAL", "CARDINAL")

_FUNCTION_WORDS = """
a about above according across after afterward afterwards again against all almost along already
also although always am among amongst an and another any anybody anyone anything are around as aside
at away be because become been before behind being below beneath beside besides between beyond both
but by can cannot could despite did do does doing done down during each either else elsewhere enough
even ever every everybody everyone everything except few following for former formerly from further
furthermore had has have having he hence her here hers herself him himself his how however i if in
indeed inside instead into is it its itself just latter least less like many may me meanwhile might
mine more moreover most mostly much must my myself near neither never nevertheless next no nobody
none nonetheless nor not nothing now of off often on once one only onto or other others otherwise
ought our ours ourselves out outside over own per perhaps quite rather regarding same shall she
should since so some somebody someone something sometimes somewhat still such than that the their
theirs them themselves then there thereafter therefore these they this those though through
throughout thus to together too toward towards under underneath unless unlike until up upon us very
was we well were what whatever when whenever where whereas wherever whether which while who whoever
whole whom whose why will with within without would yet you your yours yourself yourselves
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())

_WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:['’][^\W_]+)*")
_POSSESSIVE = re.compile(r"['’]s$")


def surface(text: str) -> list[str]:
    """The words of a text as they stand; hyphens part words, 1,200 and 3.5 are one each."""
    return _WORD.findall(unicodedata.normalize("NFKC", text))


def normal_form(word: str) -> str:
    """What two spellings of a word share: no case, no possessive."""
    return _POSSESSIVE.sub("", word.casefold())


def words(text: str) -> list[str]:
    """The words in normal form, in order; their set is the paper's W(C)."""
    return [normal_form(word) for word in surface(text)]


def jaccard(a: Iterable[str], b: Iterable[str]) -> float:
    """J = |A ∩ B| / |A ∪ B| over words."""
    left, right = set(a), set(b)
    return len(left & right) / len(left | right) if left | right else 1.0


def entropy(word: str) -> float:
    """Shannon entropy of the letters of a word, in bits."""
    return -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())


class Names(NamedTuple):
    """A way to find the named entities of a text; the label goes on record."""

    label: str
    find: Callable[[str], list[str]]


def capitals(text: str) -> list[str]:
    """Where spaCy is not at hand: every capitalised word may be a name."""
    return [word for word in surface(text) if word[0].isupper()]


CAPITALS = Names("capitalised words", capitals)


def find_names(how: str = "auto") -> Names:
    """``how``: "auto" (spaCy where installed), "capitals", or a spaCy pipeline's name or folder."""
    if how == "capitals":
        return CAPITALS
    pipeline = PIPELINE if how == "auto" else how
    try:
        import spacy

        nlp: Any = spacy.load(Path(pipeline) if Path(pipeline).is_dir() else pipeline)
    except (ImportError, OSError) as error:
        if how == "auto":
            return CAPITALS
        missing = isinstance(error, ImportError)
        raise VariantsError(
            f"--entities {how}: "
            + ("spaCy is not installed" if missing else "spaCy has no such pipeline or folder")
            + f". pip install spacy, python -m spacy download {PIPELINE}, or --entities capitals"
        ) from error
    label = f"spaCy {nlp.meta['lang']}_{nlp.meta['name']} {nlp.meta['version']}"
    return Names(label, lambda text: [e.text for e in nlp(text).ents if e.label_ not in NUMBERS])


def forbidden_tokens(text: str, names: Names) -> dict[str, str]:
    """T_forbid: normal form → word as it stands, in order of appearance.

    Words of named entities, words with a digit, and long high-entropy words; function words never.
    The paper gives no numbers for "long" and "high-entropy": ours are ``LONG`` and ``ENTROPY``.
    """
    named = {word for name in names.find(text) for word in words(name)}
    found: dict[str, str] = {}
    for word in surface(text):
        key = normal_form(word)
        if key in FUNCTION_WORDS:
            continue
        long = len(key) >= LONG and entropy(key) >= ENTROPY
        if long or key in named or any(c.isdigit() for c in key):
            found.setdefault(key, word)
    return found
