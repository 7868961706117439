"""The paper's prompts, word for word (Appendix E, "Verbatim Prompt")."""

from __future__ import annotations

import re
from collections.abc import Iterable

CATEGORIES = ("partial_same", "paraphrase", "significant_paraphrase", "similar_topic")

SYSTEM = (
    "You are generating controlled text variants for a machine learning experiment.\n"
    "Return ONLY valid JSON. Do NOT include markdown, explanations, or extra text."
)

USER = """\
Given the following text z_star, generate text variants in four categories.

Return a JSON object with EXACTLY the following keys:
- "partial_same"
- "paraphrase"
- "significant_paraphrase"
- "similar_topic"

Each value must be a list of strings.

Constraints:
- Each string must be ONE English sentence.
- Do not copy z_star verbatim except for "partial_same".
- "partial_same": truncated or lightly edited version of z_star (1 item).
- "paraphrase": same meaning, mild rewriting (at least K candidates).
- "significant_paraphrase": same meaning, substantial rewriting,
avoid reusing entities.
- "similar_topic": same general topic, different facts/details,
minimal lexical overlap.

Forbidden tokens:
[FORBIDDEN_TOKEN_LIST]

z_star:
[SOURCE TEXT]"""

_PLACES = re.compile(r"(?<=at least )K(?= candidates)|\[FORBIDDEN_TOKEN_LIST\]|\[SOURCE TEXT\]")


def user_prompt(z_star: str, forbidden: Iterable[str], k: int) -> str:
    """``USER`` with its three places filled in one pass: what is in the source stays as it is."""
    tokens = ", ".join(forbidden) or "(none)"
    filled = {"K": str(k), "[FORBIDDEN_TOKEN_LIST]": tokens, "[SOURCE TEXT]": z_star}
    return _PLACES.sub(lambda place: filled[place[0]], USER)


def wanted(category: str, k: int) -> int:
    """K_each; the prompt asks for one ``partial_same``."""
    return 1 if category == "partial_same" else k
