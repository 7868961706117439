"""Answers of ``inrun.ask`` for people: each question, the examples that taught it, word by word."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inrun.asking.stored import Answers, open_answers
from inrun.ledger import LedgerError
from inrun.ledger.saved import SavedRun
from inrun.output import check_output, write_output
from inrun.report.examples import load_examples, load_tokens
from inrun.report.render import render
from inrun.report.tokens import Text, Tokenizer, decoder, pieces, shortened

FOLDER = "answers"  # of a run
SHOWN = 5  # examples of each question
QUESTIONS = 100  # on a page
TEXT = 4000  # characters

SCRIPTS = ("charts.js", "shell.js", "shaded.js", "answers.js", "alone.js")

Examples = str | Path | Mapping[Any, str]


def entries(
    answers: Answers, n: int = SHOWN, worst: bool = False, examples: Examples | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Each question with its n examples of the highest (``worst``: lowest) scores, ready for JSON:
    their text, and the pieces of it with their scores where those of positions are known."""
    names = answers.questions[:QUESTIONS]
    rows = {}
    for q in names:
        found = answers.scores.sort_values(q, ascending=worst, kind="stable").head(n)
        rows[q] = list(zip(found["id"].tolist(), found[q].tolist(), strict=True))
    ids = list(dict.fromkeys(key for some in rows.values() for key, _ in some))
    texts, strings = _content(examples, ids)
    by_id = {} if answers.tokens is None else dict(list(answers.tokens.groupby("id", sort=False)))
    decode = None if tokenizer is None else decoder(tokenizer)

    def one(key: Any, score: float, question: str) -> dict[str, Any]:
        found: dict[str, Any] = {"id": key, "score": float(f"{score:.5g}")}
        if key in texts:
            found["text"] = texts[key][:TEXT]
        if key in by_id:
            own = by_id[key]
            inputs = None if own["input"].isna().any() else own["input"].astype(int).tolist()
            text = Text(key, 0, own[question].to_numpy(float), inputs)
            found |= shortened(pieces(text, strings.get(key), decode))
            found["words"] = bool(key in strings or (decode and inputs))
        return found

    return [
        {
            "question": q,
            "loss": float(f"{loss:.5g}"),
            "examples": [one(key, score, q) for key, score in rows[q]],
        }
        for q, loss in zip(names, answers.losses, strict=False)
    ]


def _content(
    examples: Examples | None, ids: list[Any]
) -> tuple[Mapping[Any, str], Mapping[Any, list[str]]]:
    """Text and strings of the positions of these examples, where they are known."""
    if examples is None:
        return {}, {}
    if isinstance(examples, Mapping):
        return {i: str(examples[i]) for i in ids if i in examples}, {}
    frame = load_examples(examples, ids)
    known = zip(frame["id"], frame["text"], strict=True)
    return {i: x for i, x in known if isinstance(x, str)}, load_tokens(examples, ids)


def answers_of(saved: SavedRun, folder: Path | None) -> Answers | None:
    """The answers of a run: those in its own folder, or in another one that is named."""
    if folder is None:
        folder = saved.path / FOLDER
        if not folder.is_dir():
            return None
    found = open_answers(folder)
    if found.run != saved.info.get("run"):
        raise LedgerError(
            f"{folder} holds answers of another run than {saved.path}: ask this one, or name the "
            "folder of its answers"
        )
    return found


def section(
    saved: SavedRun, folder: Path | None, examples: str | Path | None, tokenizer: Tokenizer | None
) -> list[dict[str, Any]] | None:
    """What the report of a run shows of its answers; None if there are none. Those that it finds by
    itself and cannot read are left out with a warning."""
    try:
        found = answers_of(saved, folder)
    except LedgerError as error:
        if folder is not None:
            raise
        warnings.warn(f"the report is without its answers: {error}", stacklevel=4)
        return None
    return None if found is None else entries(found, SHOWN, False, examples, tokenizer)


def write_answers(
    output: str | Path,
    answers: str | Path | Answers,
    examples: Examples | None = None,
    *,
    n: int = SHOWN,
    tokenizer: Tokenizer | None = None,
    replace: bool = False,
) -> int:
    """Write the answers as one HTML page that loads nothing; returns its size in bytes.

    Args:
        answers: the folder, ``inrun.ask(..., out=folder)``, or ``inrun.open_answers(folder)``.
        examples: what the ids stand for: a file as in ``inrun report --examples``, or texts by id.
        n: examples of each question.
        tokenizer: of the input ids, as in ``write_report``.
        replace: a file that is there may be replaced; never the examples or a file of a ledger.
    """
    path = Path(output)
    read = answers if isinstance(answers, Answers) else open_answers(answers)
    file = None if isinstance(examples, Mapping) or examples is None else Path(examples)
    check_output(path, inputs=[file, read.path], force=replace)
    data = {
        "title": "Who taught it this?",
        "about": [
            f"{len(read.questions):,} question{'s' if len(read.questions) > 1 else ''}",
            f"{read.examples:,} training examples",
        ],
        "answers": entries(read, n, False, examples, tokenizer),
    }
    page = render(data, "answers.html", SCRIPTS)
    return write_output(path, page.encode("utf-8", "replace"), replace)
