"""Texts shaded by the value of each position, from the ledger to Chromium."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from inrun.cli.app import app
from inrun.ledger import LedgerError
from inrun.ledger.entries import StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.tokens import Tokens
from inrun.report import write_report
from inrun.report.data import payload
from inrun.report.tokens import TEXTS, decoder

HOSTILE = "<script>window.pwned = 1</script>"
STRINGS = [f"aé{HOSTILE}z€", "plain words", "the third"]


def make_run(path, texts=STRINGS, steps=2, targets=("a", "b")):
    """Bytes of the texts; the values of a text's positions are 1, 2, … times its own size."""
    store = Store.create(path, {}, list(targets), ["secant"])
    for step in range(steps):
        inputs = [list(t.encode()) for t in texts]
        sizes = np.array([len(x) for x in inputs])
        V = [np.arange(1.0, n + 1) * (1e-3 if k % 2 == 0 else -1e-3) * (k + 1 + step)
             for k, n in enumerate(sizes)]  # fmt: skip
        values = np.stack([np.concatenate(V) * (q + 1) for q in range(len(targets))])[None]
        whole = np.array([[v.sum() * (q + 1) for v in V] for q in range(len(targets))])[None]
        tokens = Tokens(sizes, values.astype(np.float32), np.concatenate(inputs))
        ids = np.array([f"ex-{k}" for k in range(len(texts))], object)
        store.append(StepEntry(step, ids, whole, 1e-3, tokens=tokens))
    store.append(StepEntry(steps, np.array(["ex-0"], object), np.ones((1, len(targets), 1)), 1e-3))
    store.close()
    return open_run(path)


def test_bytes_become_characters_and_keep_their_sum(tmp_path):
    run = make_run(tmp_path / "run")
    found = payload(run, tokenizer="bytes")["tokens"]
    assert found["count"] == 6 and found["words"] and len(found["texts"]) == 6
    values = [t["value"] for t in found["texts"]]
    assert values == sorted(values, reverse=True)
    [text] = [t for t in found["texts"] if (t["id"], t["step"]) == ("ex-0", 0)]
    assert "".join(s for s, *_ in text["pieces"]) == STRINGS[0]
    assert [s for s, *_ in text["pieces"][:3]] == ["a", "é", "<"]
    assert [t for *_, t in text["pieces"][:3]] == [0, 1, 3]
    mean = 1e-3 * 1.5  # over the targets
    assert [v for _, v, _ in text["pieces"][:3]] == pytest.approx([mean, (2 + 3) * mean, 4 * mean])
    n = len(STRINGS[0].encode())
    assert sum(v for _, v, _ in text["pieces"]) == pytest.approx(mean * n * (n + 1) / 2)
    history = run.history().query("step == 0").set_index("id")["value"]
    assert text["value"] == pytest.approx(history["ex-0"], rel=1e-4)


def test_strings_of_the_examples_come_first(tmp_path):
    run = make_run(tmp_path / "run")
    rows = [{"id": f"ex-{k}", "text": "?", "tokens": [f"w{i} " for i in range(4)]} for k in (0, 1)]
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = payload(run, file, tokenizer="bytes")["tokens"]
    by_id = {t["id"]: t for t in found["texts"] if t["step"] == 0}
    pieces = by_id["ex-1"]["pieces"]
    assert [s for s, *_ in pieces] == ["w0 ", "w1 ", "w2 ", "w3 ", " …"]
    n = len(STRINGS[1])
    assert pieces[-1][1] == pytest.approx(-2e-3 * 1.5 * sum(range(5, n + 1)), rel=1e-3)
    assert "".join(s for s, *_ in by_id["ex-2"]["pieces"]) == STRINGS[2]
    assert found["words"]


def test_without_a_tokenizer_input_ids_are_shown(tmp_path):
    run = make_run(tmp_path / "run")
    found = payload(run)["tokens"]
    assert not found["words"]
    [text] = [t for t in found["texts"] if (t["id"], t["step"]) == ("ex-1", 0)]
    assert [s for s, *_ in text["pieces"]][:3] == [f"{i} " for i in b"pla"]


def test_only_the_best_and_the_worst_of_many(tmp_path):
    run = make_run(tmp_path / "run", texts=["ab"] * 40, steps=1)
    found = payload(run, tokenizer="bytes")["tokens"]
    assert found["count"] == 40 and len(found["texts"]) == 2 * TEXTS
    every = run.history().query("step == 0").sort_values("value", ascending=False)["id"].tolist()
    assert [t["id"] for t in found["texts"]] == every[:TEXTS] + every[-TEXTS:]


def test_tokenizers(tmp_path):
    assert decoder(lambda ids: f"<{ids}>")([3]) == "<[3]>"
    with pytest.raises(LedgerError, match="the model received 300, which is no byte"):
        decoder("bytes")([65, 300])
    pytest.importorskip("transformers")
    with pytest.raises(LedgerError, match=r"tokenizer .*nowhere cannot be loaded"):
        decoder(tmp_path / "nowhere")


def test_a_tokenizer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"▁the": 0, "▁cat": 1, "s": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="s"))
    made.decoder = tokenizers.decoders.Metaspace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "t")
    decode = decoder(tmp_path / "t")
    assert "".join(decode([i]) for i in (0, 1, 2)) == " the cats"


def test_the_command(tmp_path):
    make_run(tmp_path / "run")
    file = tmp_path / "r.html"
    command = ["report", str(tmp_path / "run"), "-o", str(file), "--tokenizer", "bytes"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    page = file.read_text("utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert json.loads(data.group(1))["tokens"]["count"] == 6
    assert page.count("<script") == 2


def test_the_browser_shades_tokens_by_value(browser, tmp_path):
    write_report(make_run(tmp_path / "run"), tmp_path / "r.html", tokenizer="bytes")
    browser.get((tmp_path / "r.html").as_uri())
    articles = browser.find_elements("css selector", "#tokens article")
    assert len(articles) == 6
    assert articles[0].find_element("tag name", "p").text.startswith("aé" + HOSTILE)
    colours = "return [...arguments[0].querySelectorAll('p span')].map("
    colours += "(s) => getComputedStyle(s).backgroundColor)"
    best, worst = (browser.execute_script(colours, articles[k]) for k in (0, -1))
    assert len(set(best)) > 5 and not set(best) & set(worst)  # other hues
    span = articles[0].find_elements("css selector", "p span")[1]
    browser.execute_script("arguments[0].click()", span)
    says = articles[0].find_element("tag name", "output").text
    assert says.startswith("· position 1: 0.0") and says[2:] == span.get_attribute("title")
    assert browser.execute_script("return window.pwned") is None
    assert browser.get_log("browser") == []


def test_a_run_without_positions_has_no_such_section(browser, tmp_path):
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    store.append(StepEntry(0, np.arange(3), np.ones((1, 1, 3)), 1e-3))
    store.close()
    assert payload(open_run(tmp_path / "run"))["tokens"] is None
    write_report(open_run(tmp_path / "run"), tmp_path / "r.html")
    browser.get((tmp_path / "r.html").as_uri())
    assert browser.find_elements("css selector", "#tokens, nav a[href='#tokens']") == []
    assert browser.get_log("browser") == []
