"""Scores of positions add up to those of their examples, and the page escapes what it shows."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inrun
from inrun.asking.page import write_answers


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return torch.tanh(self.inner(self.table(ids))) @ self.table.weight.t()


def lm(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def test_positions_add_up_and_are_shown(tmp_path):
    torch.manual_seed(0)
    model = Small().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, 7, (6, 4))
    run = inrun.watch(model, optimizer, validation=[data], loss=lm, estimator="influence")
    for _ in range(10):
        with run.batch(range(6)):
            lm(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    queries = {"a": data[:1], "b": data[1:2]}
    scores = inrun.ask(model, [(list(range(6)), data)], queries, run=run, loss=lm)
    some = [([4, 2], data[[4, 2]])]
    options = {"run": run, "loss": lm, "tokens": True}
    tokens = inrun.ask(model, some, queries, examples=6, **options)
    assert list(tokens.columns) == ["id", "position", "input", "a", "b"]
    assert tokens["id"].tolist() == [4] * 4 + [2] * 4
    assert tokens["position"].tolist() == [0, 1, 2, 3] * 2
    assert tokens["input"].tolist() == data[[4, 2]].flatten().tolist()
    sums = tokens.groupby("id")[["a", "b"]].sum()
    wanted = scores.set_index("id").loc[[2, 4], ["a", "b"]]
    np.testing.assert_allclose(sums.to_numpy(), wanted.to_numpy(), rtol=1e-6)
    with pytest.raises(ValueError, match="pass examples=N"):
        inrun.ask(model, some, queries, **options)

    texts = {i: f"<script>alert({i})</script>" for i in range(6)}
    strings = {i: [f"<{t}> " for t in row.tolist()] for i, row in enumerate(data)}
    file = tmp_path / "answers.html"
    size = write_answers(
        file, scores, {"a": "Why & how?", "b": "<b>"}, texts, top=6, tokens=tokens, strings=strings
    )
    page = file.read_text()
    assert size == len(page.encode()) and "<script" not in page and "<b><" not in page
    assert "Why &amp; how?" in page and page.count("<article>") == 12
    shaded = re.findall(r'<i class="[hc][1-8]" title="[-+.e\d]+">&lt;\d&gt; </i>', page)
    assert len(shaded) == page.count("<i ") > 4
    with pytest.raises(ValueError, match="no scores of the question 'c'"):
        write_answers(tmp_path / "x.html", scores, {"c": "?"}, texts)
    with pytest.raises(Exception, match="exists"):
        write_answers(file, scores, {"a": "?"}, texts)
    assert pd.api.types.is_float_dtype(scores["a"])
