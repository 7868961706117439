"""Sources, and replies of a model whose variants of them pass."""

import json

from helpers.chat_server import completion
from inrun.variants import Source
from inrun.variants.tokens import surface

NAMES = ("Alba", "Bruno", "Clara", "Dante", "Edith", "Felix")

SOURCES = [
    Source(i, f"In spring young {name} sold the old farm near the lake and went to sea.")
    for i, name in enumerate(NAMES)
]

TAGS = ("red", "blue", "green", "white", "black")


def good(text, n=3):
    """Variants of any source that pass."""
    said = surface(text)
    return {
        "partial_same": [" ".join(said[:-3]) + "."],
        "paraphrase": [
            " ".join([*said[:i], tag, *said[i + 5 :]]) for i, tag in enumerate(TAGS[:n])
        ],
        "significant_paraphrase": [f"Someone left home under a {tag} sail." for tag in TAGS[:n]],
        "similar_topic": [f"Dairy prices rose again this {tag} autumn." for tag in TAGS[:n]],
    }


def fine(text, request):
    return completion(json.dumps(good(text)))


def rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
