"""docs/architecture.md names files and symbols that exist, where it says that they are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TREES = ROOT, ROOT / "src" / "inrun"
FILE = r"[\w/]+\.(?:py|json|md|toml)"


def found(name):
    return next((p for tree in TREES if (p := tree / name).exists()), None)


@pytest.mark.parametrize("name", sorted(set(re.findall(rf"`({FILE}|[\w/]+/)`", PAGE))))
def test_every_file_exists(name):
    assert found(name) is not None


PLACED = re.findall(rf"`([A-Za-z_][\w.]*)`(?: in| of)?(?: \(| +|\n *\(?){{1,2}}`({FILE})`", PAGE)


def test_there_are_symbols_with_a_place():
    assert len(PLACED) > 20


@pytest.mark.parametrize(("symbol", "file"), sorted(set(PLACED)))
def test_every_symbol_is_in_its_file(symbol, file):
    text = found(file).read_text()
    assert re.search(rf"\b{symbol.rpartition('.')[2]}\b", text), f"{symbol} is not in {file}"


NAMES = sorted(set(re.findall(r"`@?([A-Za-z_][\w.]*?)(?:\(.*?\)|=)?`", PAGE)))


def test_every_name_occurs_in_the_code():
    code = "".join(p.read_text() for tree in ("src", "tests") for p in (ROOT / tree).rglob("*.py"))
    unknown = [n for n in NAMES if not re.search(rf"\b{re.escape(n.rpartition('.')[2])}\b", code)]
    assert not unknown


def test_no_word_of_the_glossary_has_two_meanings():
    table = PAGE[PAGE.index("## Glossary") : PAGE.index("## Add an operation")]
    words = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:]
    assert len(words) == len(set(words)) > 50
    assert {"owner", "owners", "position", "slot", "nobody"} <= set(words)
