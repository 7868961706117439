"""The report: inert whatever the data hold, small at 100,000 examples, and alive in Chromium."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import LedgerError
from inrun.ledger.entries import Audit, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.signals import Window
from inrun.report import embed, render, write_report
from inrun.report.data import payload

HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "</script><script>window.pwned = 1</script><!--",
    "line\u2028separator\u2029paragraph & &lt;b&gt;",
    "\u202eשלום מרחבא مرحبا",
    "A" * 1_000_000,
    'javascript:window.pwned=1" onmouseover="window.pwned=1',
    "%%script%% ${window.pwned=1} 😀 \ud800 \x00",
]


def make_run(path, n=60, steps=40, targets=("a", "b"), audit=True, kind=str):
    rng = np.random.default_rng(0)
    store = Store.create(path, {"lr": 1e-3}, list(targets), ["secant", "sgd"])
    store.update_info(model={"class": "Net"}, coverage={"share": 0.75})
    for step in range(steps):
        ids = rng.choice(n, min(n, 16), replace=False)
        values = rng.normal(size=(2, len(targets), len(ids))) * 1e-4 + ids / n * 1e-3 - 3e-4
        loss = np.full(len(targets), 2.0 - step / 50)
        measured = Audit(loss, loss - 0.01, loss - 0.02) if audit else None
        named = np.array([f"ex-{i}" for i in ids], object) if kind is str else ids
        store.append(StepEntry(step, named, values, 1e-3, audit=measured))
    store.close()
    return open_run(path)


def make_examples(path, n=60):
    texts = [HOSTILE[i] if i < len(HOSTILE) else f"plain text number {i}" for i in range(n)]
    labels = [HOSTILE[i % 5] if i < 10 else f"label {i % 3}" for i in range(n)]
    with path.open("w") as file:
        for i, (text, label) in enumerate(zip(texts, labels, strict=True)):
            row = {"id": f"ex-{i}", "text": text, "label": label, "group": f"group {i % 4}"}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run = make_run(folder / "run")
    write_report(run, folder / "report.html", make_examples(folder / "examples.jsonl"))
    return folder / "report.html"


def embedded(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found.group(1))


def test_hostile_strings_stay_in_the_data(hostile_report):
    page = hostile_report.read_text("utf-8")
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "window.pwned" in page and "<img" not in page
    assert len(page) < 300_000  # the 1 MB string was cut
    data = embedded(page)
    content = {data["columns"]["id"][int(i)]: c for i, c in data["content"].items()}
    assert content["ex-2"]["text"] == HOSTILE[2]
    assert content["ex-5"]["length"] == 1_000_000 and len(content["ex-5"]["text"]) <= 1501
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page and "@import" not in page


def test_embedded_data_cannot_end_the_script():
    text = embed({"a": "<>&\u2028\u2029</script>"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": "<>&\u2028\u2029</script>"}


@pytest.mark.parametrize("known", [True, False])
def test_suspects_by_signals_and_epochs(tmp_path, known):
    store, rng = Store.create(tmp_path / "run", {}, ["all"], ["secant"]), np.random.default_rng(0)
    for step in range(6):
        signals = rng.random((4, 12)) if known else np.full((4, 12), np.nan)
        values = rng.normal(size=(1, 1, 12))
        store.append(StepEntry(step, np.arange(12), values, 0.1, signals=signals))
    store.close()
    run = open_run(tmp_path / "run")
    data = payload(run)
    found = [data["columns"]["id"][i] for i in data["lists"]["suspects"]]
    by = run.suspects() if known else run.harm().sort_values("harm", ascending=False)
    assert found == by["id"].tolist()
    assert data["window"] == (by.attrs["window"] if known else None)
    epochs = run.epochs()
    assert [e["since"] for e in data["epochs"]] == epochs["since"].tolist()
    np.testing.assert_allclose([e["value"] for e in data["epochs"]], epochs["value"])
    json.loads(embed(data))


def test_a_window_is_of_values_harm_and_suspects(tmp_path):
    store, rng = Store.create(tmp_path / "run", {}, ["all"], ["secant"]), np.random.default_rng(0)
    for step in range(6):
        ids, values = np.arange(step, step + 8), rng.normal(size=(1, 1, 8))
        store.append(StepEntry(step, ids, values, 0.1, signals=rng.random((4, 8))))
    store.close()
    run = open_run(tmp_path / "run")
    data = payload(run, window=Window(1, 5, 2.0))
    wanted = run.values(since=1, until=5, half_life=2.0)
    assert data["columns"]["id"] == wanted["id"].tolist() and data["examples"] == 11
    np.testing.assert_allclose(data["columns"]["value"], wanted["value"], rtol=1e-4)
    harm = run.harm(since=1, until=5)["harm"]
    np.testing.assert_allclose(data["columns"]["harm"], harm, rtol=1e-4)
    suspects = run.suspects(since=1, until=5)
    assert data["window"] == suspects.attrs["window"] and data["window"]["since"] == 1
    listed = [data["columns"]["id"][i] for i in data["lists"]["suspects"]]
    assert listed == suspects["id"].tolist()
    said = "values only from step 1 on, before step 5, half for each 2 steps of age"
    assert said in data["about"] and said not in payload(run)["about"]


def test_payload_says_what_the_tables_say(tmp_path):
    run = make_run(tmp_path / "run", kind=int)
    data = payload(run)
    values = run.values()
    assert [c["name"] for c in data["cards"]] == [
        "Examples", "Steps", "Explained", "Batch share", "Momentum share", "Steadiness",
            "Coverage",
    ]  # fmt: skip
    best = [data["columns"]["id"][i] for i in data["lists"]["best"]]
    assert best == values.sort_values("value", ascending=False)["id"].tolist()
    suspects = [data["columns"]["id"][i] for i in data["lists"]["suspects"]]
    assert suspects == run.harm().sort_values("harm", ascending=False)["id"].tolist()
    assert sum(data["histogram"]["counts"]) == len(values)
    assert data["audit"]["batch_share"][-1] == pytest.approx(0.01 * 40)
    assert data["audit"]["sum"][-1] == pytest.approx(run.steps()["sum"].sum(), rel=1e-4)
    assert data["heat"] == [] and data["by"] == {}
    sgd = payload(run, estimator="sgd")
    assert sgd["columns"]["value"] != data["columns"]["value"]


def test_the_heat_map_has_the_mean_of_each_group(tmp_path):
    run = make_run(tmp_path / "run", targets=("a", "b", "c"))
    data = payload(run, make_examples(tmp_path / "examples.jsonl"))
    assert [h["by"] for h in data["heat"]] == ["group", "label"]
    heat = data["heat"][0]
    assert heat["rows"] == [f"group {i}" for i in range(4)] and heat["columns"] == ["a", "b", "c"]
    values = run.values()
    group = values["id"].str[3:].astype(int) % 4
    expected = values.groupby(group)["b"].mean()
    np.testing.assert_allclose([row[1] for row in heat["mean"]], expected, rtol=1e-4)
    counts = {r["name"]: r["n"] for r in data["by"]["group"]}
    assert counts == {f"group {i}": 15 for i in range(4)}


@pytest.mark.parametrize("case", ["empty", "unscored", "one", "huge ids"])
def test_reports_of_small_and_odd_runs_are_written(tmp_path, case):
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    if case == "unscored":
        store.append(StepEntry(0, np.array([1, 2]), None, 0.1))
    elif case == "one":
        store.append(StepEntry(0, np.array([1]), np.ones((1, 1, 1)), 0.1))
    elif case == "huge ids":
        store.append(StepEntry(0, np.array([2**60, 2**60 + 1]), np.zeros((1, 1, 2)), 0.1))
    store.close()
    data = payload(open_run(tmp_path / "run"))
    assert "<h1" in render(data)
    if case == "huge ids":
        assert data["columns"]["id"] == [str(2**60), str(2**60 + 1)]


def test_a_few_megabytes_at_100000_examples(tmp_path):
    rng = np.random.default_rng(0)
    store = Store.create(tmp_path / "run", {}, ["a"], ["secant"])
    for step in range(10):
        ids = np.arange(step * 10_000, (step + 1) * 10_000)
        store.append(StepEntry(step, ids, rng.normal(size=(1, 1, 10_000)) * 1e-4, 0.1))
    store.close()
    table = pd.DataFrame({"text": ["some words " * 50] * 100_000, "label": np.arange(100_000) % 10})
    table.to_parquet(tmp_path / "examples.parquet")
    size = write_report(
        open_run(tmp_path / "run"), tmp_path / "r.html", tmp_path / "examples.parquet"
    )
    assert size < 5_000_000
    data = embedded((tmp_path / "r.html").read_text("utf-8"))
    assert len(data["columns"]["id"]) == 100_000 and len(data["content"]) <= 600


def test_examples_without_matching_ids(tmp_path):
    run = make_run(tmp_path / "run")
    pd.DataFrame({"id": ["x", "y"], "text": "t"}).to_csv(tmp_path / "e.csv", index=False)
    with pytest.raises(LedgerError, match=r"no id of the run is in .*: the run has 'ex-0', "):
        payload(run, tmp_path / "e.csv")


# -- in a real browser ------------------------------------------------------------------------


@pytest.fixture
def page(browser, hostile_report):
    browser.get(hostile_report.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.pwned") is None


def rows(page, table="examples-table"):
    cells = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map("
    cells += "(r) => [...r.children].map((c) => c.innerText))"
    return page.execute_script(cells, table)


def wait(condition):
    for _ in range(1000):  # half a minute, for busy machines
        if condition():
            return
        time.sleep(0.03)
    raise AssertionError("nothing happened")


def test_the_page_shows_cards_charts_and_tables(page):
    assert page.find_element("id", "title").text == "run"
    assert len(page.find_elements("css selector", ".card")) == 7
    assert len(page.find_elements("css selector", ".chart svg")) == 3
    assert len(rows(page)) == 10 and len(rows(page, "suspects-table")) == 10
    assert page.execute_script("return document.scripts.length") == 2
    width = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert page.execute_script(width)


def test_a_click_on_a_column_sorts(page):
    head = page.find_element("css selector", "#examples-table th[data-key=value]")
    head.find_element("tag name", "button").click()
    assert head.get_attribute("aria-sort") == "descending"
    first = [float(r[5].split()[0].replace("−", "-")) for r in rows(page)]
    assert first == sorted(first, reverse=True)
    head.find_element("tag name", "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    first = [float(r[5].split()[0].replace("−", "-")) for r in rows(page)]
    assert first == sorted(first)


def test_the_search_filters_rows(page):
    search = page.find_element("css selector", "#examples-table input")
    search.send_keys("NUMBER 33")
    wait(lambda: [r[2] for r in rows(page)] == ["ex-33"])
    search.clear()
    search.send_keys("<img")
    wait(lambda: len(rows(page)) > 0 and all("<img" in r[1] + r[3] for r in rows(page)))
    search.send_keys("nothing has this")
    wait(lambda: rows(page) == [["Nothing matches."]])


def test_paging_reaches_every_row(page):
    status = page.find_element("css selector", "#examples-table .pager [role=status]")
    assert status.text == "1–10 of 60"
    seen = {r[2] for r in rows(page)}
    back, forward = page.find_elements("css selector", "#examples-table .pager button")
    assert back.get_attribute("disabled")
    for _ in range(5):
        page.execute_script("arguments[0].click()", forward)
        seen |= {r[2] for r in rows(page)}
    assert status.text == "51–60 of 60" and forward.get_attribute("disabled") and len(seen) == 60


def test_the_theme_is_kept_and_the_keyboard_works(page):
    def colour():
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    before, button = colour(), page.find_element("id", "theme")
    button.click()
    assert colour() != before and button.text in ("Light theme", "Dark theme")
    page.refresh()
    assert colour() != before  # kept
    page.find_element("id", "theme").send_keys("\ue007")
    assert colour() == before
    chart = page.find_element("css selector", "#shares svg")
    chart.send_keys("\ue014\ue014")
    assert page.find_element("id", "shares-readout").text.startswith("step 1 ")


def test_hostile_strings_do_not_execute(page):
    every = page.find_elements("css selector", "#examples-table .tabs button")[2]
    page.execute_script("arguments[0].click()", every)
    page.execute_script(
        "const s = document.querySelector('#examples-table .pager select');"
        "s.value = '100'; s.dispatchEvent(new Event('change'))"
    )
    table = rows(page)
    assert len(table) == 60
    texts = " ".join(r[1] for r in table)
    assert "<script>window.pwned = 1</script>" in texts and "1,000,000 characters" in texts
    assert page.execute_script("return document.querySelectorAll('main img').length") == 0
    right = "return getComputedStyle([...document.querySelectorAll('.text')].find("
    right += "(x) => x.textContent.includes('שלום'))).direction"
    assert page.execute_script(right) == "rtl"
    inject = "const s = document.createElement('script'); s.textContent = 'window.pwned = 1';"
    page.execute_script(inject + "document.body.append(s)")  # refused by the policy
    assert "Content Security Policy" in page.get_log("browser")[0]["message"]


def test_the_page_fits_a_narrow_screen(page):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        page.refresh()
        assert page.execute_script("return document.documentElement.scrollWidth") == 390
        assert page.find_element("css selector", "#examples-table .sorter").is_displayed()
        inside = "return [...document.querySelectorAll('.rows td')].every((x) => x.scrollWidth <= "
        assert page.execute_script(inside + "x.clientWidth + 1)")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
