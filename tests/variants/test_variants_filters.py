"""Prompts, forbidden tokens, windows: what passes the filter of Appendix E and what does not."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest

from inrun.variants import VariantsError, check, find_names
from inrun.variants.files import read_rows
from inrun.variants.filters import WINDOWS, Sifted, clean, draw, parse_windows, select, sift
from inrun.variants.prompts import CATEGORIES, SYSTEM, USER, user_prompt
from inrun.variants.tokens import (
    CAPITALS,
    FUNCTION_WORDS,
    entropy,
    forbidden_tokens,
    jaccard,
    words,
)

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("INRUN_DATA", ROOT.parent / "shared" / "data"))
Z = "On 13 December 2014, the submarine Arihant set off for its extensive sea trials near Vizag."


def test_prompts_are_the_papers():
    paper = DATA.parent / "paper" / "paper.tex"
    if not paper.exists():
        pytest.skip(f"no {paper}: the prompts are held against the paper's source where it is")
    text = paper.read_text("utf-8")
    verbatim = re.search(r"\\begin\{verbatim\}\n(.*?)\n\\end\{verbatim\}", text, re.DOTALL)
    assert verbatim[1] == USER
    assert re.search(r"\\ttfamily\n(.*?)\n\\end\{quote\}", text, re.DOTALL)[1] == SYSTEM


def test_prompt_is_filled_once():
    tricky = "K candidates of [FORBIDDEN_TOKEN_LIST] and [SOURCE TEXT]"
    prompt = user_prompt(tricky, ["Arihant", "2014"], 4)
    assert prompt.endswith(f"Forbidden tokens:\nArihant, 2014\n\nz_star:\n{tricky}")
    assert "(at least 4 candidates)" in prompt
    assert "Forbidden tokens:\n(none)\n" in user_prompt("It is so.", [], 3)


def test_words_are_split_and_compared_without_case():
    assert words("Shiva's SR-61 cost 1,200 or 3.5 µm; it’s SHIVA'S!") == (
        ["shiva", "sr", "61", "cost", "1,200", "or", "3.5", "μm", "it", "shiva"]
    )
    assert words("Re\u0301publicain") == words("Républicain")
    assert jaccard(["a", "b", "b"], ["b", "c"]) == pytest.approx(1 / 3)
    assert entropy("aaaa") == 0 and entropy("abcd") == 2


def test_names_numbers_and_long_words_are_forbidden():
    found = forbidden_tokens(Z, CAPITALS)
    assert list(found.values()) == (
        ["13", "December", "2014", "submarine", "Arihant", "extensive", "Vizag"]
    )
    assert not forbidden_tokens(
        "However, those sea trials in Mississippi themselves", CAPITALS
    ).keys() - {"mississippi"}
    assert "possesses" not in forbidden_tokens("it possesses", CAPITALS)  # long, but few letters
    assert all(word == word.casefold() for word in FUNCTION_WORDS)


def test_names_by_spacy(tmp_path):
    spacy = pytest.importorskip("spacy", reason="spaCy is optional")
    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("entity_ruler")
    ruler.add_patterns(
        [{"label": "GPE", "pattern": "old Goa"}, {"label": "CARDINAL", "pattern": "seven"}]
    )
    nlp.to_disk(tmp_path / "pipeline")
    names = find_names(str(tmp_path / "pipeline"))
    assert names.label.startswith("spaCy en_pipeline")
    found = forbidden_tokens("The seven ships left old Goa in 1510.", names)
    assert list(found) == ["old", "goa", "1510"]


def test_names_without_spacy(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    assert find_names() is CAPITALS and find_names("capitals") is CAPITALS
    with pytest.raises(VariantsError, match=r"en_core_web_lg: spaCy is not installed. pip install"):
        find_names("en_core_web_lg")


CASES = [
    ("partial_same", "On 13 December 2014, the submarine Arihant set off.", None),
    ("partial_same", Z.upper(), "copy"),
    ("partial_same", "Some other boat went its own way.", "overlap"),
    ("paraphrase", "The submarine Arihant left for extensive trials on 13 December 2014.", None),
    ("paraphrase", Z.replace("near", "off"), "overlap"),
    ("significant_paraphrase", "The boat went out so that crews could run a set of checks.", None),
    ("significant_paraphrase", "Crews ran checks on ARIHANT's hull.", "forbidden word"),
    ("significant_paraphrase", "Trials set the sea off.", "overlap"),
    ("similar_topic", "Two frigates were scrapped after a fire.", None),
    ("similar_topic", "A fire in 2014 wrecked two frigates.", "forbidden word"),
    ("similar_topic", "Off they set.", "overlap"),
    ("similar_topic", "Two frigates.", "not a sentence"),
    ("similar_topic", "  \n ", "not a sentence"),
    ("similar_topic", ["a", "list"], "not a sentence"),
    ("similar_topic", "Frigates burned down. Nobody was hurt.", "not a sentence"),
    ("similar_topic", "Prof. Smith of St. Ives met J. R. Doe in the U.S. Navy.", None),
]


@pytest.mark.parametrize(("category", "text", "reason"), CASES)
def test_dropped_variants_have_a_reason(category, text, reason):
    sifted = sift(Z, {category: [text]}, forbidden_tokens(Z, CAPITALS))
    assert [d.reason for d in sifted.dropped] == [r for r in [reason] if r]
    assert sifted.kept[category] == ([] if reason else [text])
    for drop in sifted.dropped:
        assert drop.detail and drop.category == category


def test_details_name_the_word_and_the_number():
    texts = ["Arihant and Vizag burned.", "Off they set."]
    dropped = sift(Z, {"similar_topic": texts}, forbidden_tokens(Z, CAPITALS)).dropped
    assert [d.detail for d in dropped] == ["arihant, vizag", "Jaccard 0.118 above 0.1"]


def test_duplicates_differ_in_case_or_punctuation():
    texts = ["Two frigates burned down.", "two frigates, burned down", "Two frigates burned out."]
    sifted = sift(Z, {"significant_paraphrase": texts, "similar_topic": texts[:1]}, ())
    assert sifted.kept["significant_paraphrase"] == [texts[0], texts[2]]
    assert [d.reason for d in sifted.dropped] == ["duplicate"] * 2


def test_text_is_made_fit_for_files_and_terminals():
    assert clean("a\x1b[2J\n b\ud800\t c\x00") == "a [2J b? c"


def test_selection_depends_on_the_seed_alone():
    texts = [f"Sentence {x}." for x in "abcdefgh"]
    assert draw(texts, 3, 0) == ["Sentence b.", "Sentence d.", "Sentence f."]
    assert draw(texts[::-1], 3, 0) == draw(texts, 3, 0)[::-1]
    assert draw(texts, 3, 1) != draw(texts, 3, 0) and draw(texts, 99, 0) == texts
    sifted = Sifted(dict.fromkeys(CATEGORIES, texts), [])
    assert [len(x) for x in select(sifted, 3, 0).values()] == [1, 3, 3, 3]
    assert sifted.missing(9) == dict.fromkeys(CATEGORIES[1:], 1)


def test_similarity_windows_are_parsed():
    assert parse_windows([]) == WINDOWS
    assert parse_windows(["paraphrase=0.3:0.7"]) == {**WINDOWS, "paraphrase": (0.3, 0.7)}
    for text in ("paraphrase=0.7:0.3", "paraphrase=1", "paraphrase=a:b", "exact=0:1", "x"):
        with pytest.raises(VariantsError, match="write CATEGORY=LOW:HIGH"):
            parse_windows([text])


def test_shared_variants_pass(tmp_path):
    file = DATA / "semantic" / "variants.jsonl"
    if not file.exists():
        pytest.skip(f"no {file}: set INRUN_DATA to the folder of shared data")
    report = check(file, CAPITALS)
    passed = {c: n["pass"] for c, n in report["categories"].items()}
    assert passed == dict(zip(CATEGORIES, (90, 270, 270, 270), strict=True)), report["dropped"]
    assert report["complete"] == report["sources"] == 90 and not report["dropped"]
    rows = [row for _, row in read_rows(file)]
    for row in rows:  # the filter does refuse: each category in the place of the next
        row |= {b: row[a] for a, b in itertools.pairwise(CATEGORIES)}
    (tmp_path / "moved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    moved = check(tmp_path / "moved.jsonl", CAPITALS)["categories"]
    assert moved["significant_paraphrase"]["pass"] == 0 and moved["paraphrase"]["pass"] < 45
