"""Answers in the report, on a page of their own and in the terminal: escaped, shaded, the run's."""

import json
import re

import pytest

import inrun
from helpers.asking import N, T, answered, asked_model
from inrun.ledger import LedgerError
from inrun.report import write_report
from inrun.report.answers import entries, write_answers


def data_of(page):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return answered(tmp_path_factory.mktemp("asked") / "run")


def test_entries_are_the_highest_and_the_lowest(asked):
    folder, scores, names, examples, data = asked
    answers = inrun.open_answers(folder / "answers")
    for worst in (False, True):
        found = entries(answers, 3, worst, examples)
        assert [q["question"] for q in found] == names
        for question in found:
            ordered = scores.sort_values(question["question"], ascending=worst)
            assert [e["id"] for e in question["examples"]] == ordered["id"].head(3).tolist()
            for e in question["examples"]:
                values = [v for _, v, _ in e["pieces"]]
                assert sum(values) == pytest.approx(e["score"], rel=1e-2) and len(values) == T
                assert [s for s, *_ in e["pieces"]] == [f"<{t}> " for t in data[e["id"]].tolist()]
                assert e["words"] and e["text"].startswith("</script>")
    plain = entries(answers, 2)
    assert not plain[0]["examples"][0]["words"] and "text" not in plain[0]["examples"][0]
    decoded = entries(answers, 2, tokenizer=lambda ids: "".join(f"w{i} " for i in ids))
    assert decoded[0]["examples"][0]["pieces"][0][0].startswith("w")
    assert entries(answers, 1, examples={i: f"text {i}" for i in range(N)})[0]["examples"][0][
        "text"
    ]


def test_the_report_has_them_and_so_has_a_page_alone(asked, tmp_path):
    folder, _, names, examples, _ = asked
    write_report(inrun.open(folder), tmp_path / "report.html", examples)
    size = write_answers(tmp_path / "answers.html", folder / "answers", examples, n=4)
    for file, many in (("report.html", 5), ("answers.html", 4)):
        page = (tmp_path / file).read_text()
        found = data_of(page)["answers"]
        assert [q["question"] for q in found] == names
        assert all(len(q["examples"]) == many for q in found)
        assert "<script>alert" not in page and "two & <b>" not in page and 'id="answers"' in page
        assert "default-src &#x27;none&#x27;" in page and "%%" not in page
    assert size == (tmp_path / "answers.html").stat().st_size
    with pytest.raises(Exception, match="exists already"):
        write_answers(tmp_path / "answers.html", folder / "answers", examples)
    with pytest.raises(Exception, match="what the command reads"):
        write_answers(folder / "answers" / "asked.json", folder / "answers", replace=True)


def test_answers_of_another_run_are_told_and_left_out(asked, tmp_path):
    folder, *_ = asked
    asked_model(tmp_path / "other")
    write_report(inrun.open(tmp_path / "other"), tmp_path / "none.html")
    assert data_of((tmp_path / "none.html").read_text())["answers"] is None
    (folder / "answers").rename(tmp_path / "other" / "answers")
    try:
        with pytest.warns(UserWarning, match="holds answers of another run"):
            write_report(inrun.open(tmp_path / "other"), tmp_path / "report.html")
        assert data_of((tmp_path / "report.html").read_text())["answers"] is None
        with pytest.raises(LedgerError, match="holds answers of another run"):
            write_report(
                inrun.open(tmp_path / "other"), tmp_path / "report.html",
                answers=tmp_path / "other" / "answers",
            )  # fmt: skip
    finally:
        (tmp_path / "other" / "answers").rename(folder / "answers")
