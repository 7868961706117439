"""Ids and target names: what goes in comes out, or is refused with its position."""

from __future__ import annotations

import enum

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import inrun
from inrun.ledger.entries import MemoryLedger, StepEntry
from inrun.ledger.saved import Store, open_run
from inrun.ledger.tables import RESERVED
from inrun.run.bookkeeping import as_ids

INTEGERS = st.integers(-(2**63), 2**63 - 1)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDS = st.one_of(st.lists(INTEGERS, min_size=1, max_size=9), st.lists(STRINGS, min_size=1))


class Name(str, enum.Enum):
    first = "a"


@given(IDS)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_ids_are_kept_as_they_are(ids):
    array, kind = as_ids(ids, None)
    assert array.tolist() == ids and kind is type(ids[0])
    assert as_ids(iter(ids), kind)[0].tolist() == ids
    assert as_ids(pd.Series(ids, dtype=object), kind)[0].tolist() == ids
    assert {type(x) for x in array.tolist()} == {kind}


@pytest.mark.parametrize("dtype", ["u1", "i2", "u4", "i8", "u8"])
def test_ids_of_every_integer_type(dtype):
    last = min(np.iinfo(dtype).max, 2**63 - 1)
    array = np.array([0, 7, last], dtype)
    for ids in (array, list(array), torch.from_numpy(array), list(torch.from_numpy(array))):
        found, kind = as_ids(ids, None)
        assert found.tolist() == [0, 7, last] and kind is int and found.dtype == np.int64


def test_ids_are_a_copy():
    ids = np.array([1, 2])
    kept, _ = as_ids(ids, None)
    ids[0] = 7  # a loader that fills the same array again
    assert kept.tolist() == [1, 2]
    assert as_ids(np.array([1], ">i4"), None)[0].tolist() == [1]


def test_ids_of_every_string_type():
    for ids in (np.array(["a", "b"]), np.array(["a", "b"], object), list(np.array(["a", "b"]))):
        found, _ = as_ids(ids, None)
        assert found.tolist() == ["a", "b"] and {type(x) for x in found} == {str}
    assert as_ids([Name.first], None)[0].tolist() == ["a"]


REFUSED = {
    "uint64 array": (np.array([1, 2**63 + 5], np.uint64), "position 1 of 2 is 9223372036854775813"),
    "uint64 scalars": ([np.uint64(2**63)], "does not fit into 64 bits"),
    "uint64 tensor": (torch.tensor([2**64 - 1], dtype=torch.uint64), "is 18446744073709551615"),
    "large": ([2**70], r"str\(id\), in the whole run"),
    "none": (["a", None, "b"], "position 1 of 3 is None.*every example needs an id"),
    "object array": (np.array([1, None], object), "position 1 of 2 is None"),
    "nan": ([1, float("nan")], "position 1 of 2 is nan.*every example needs an id"),
    "missing": (pd.Series([1, None]), r"position 0 of 2 is 1\.0"),
    "pandas": (pd.Series(["a", pd.NA], dtype=object), "is <NA>.*every example needs an id"),
    "bool": ([True], r"is True \(bool\)"),
    "bool tensor": (torch.tensor([True]), r"\(bool\)"),
    "float": (np.array([1.0]), r"is 1\.0 \(float\).*int\(id\)"),
    "half": (torch.ones(2, dtype=torch.bfloat16), r"is 1\.0 \(float\)"),
    "a parameter": (torch.ones(2, requires_grad=True), r"is 1\.0 \(float\)"),
    "bytes": ([b"a"], r"decode it"),
    "bytes array": (np.array([b"a"]), r"decode it"),
    "dates": (np.array(["2020"], "datetime64[D]"), r"str\(id\)"),
    "surrogate": (["a", "\ud800"], r"position 1 of 2 is '\\ud800', half a surrogate"),
    "mixed": ([1, 2, "3"], "int at position 0, str at position 2"),
    "one string": ("abc", "a single str"),
    "one number": (5, "a single int"),
    "one tensor": (torch.tensor(5), r"shape \(\)"),
    "table": (np.ones((2, 2), int), r"shape \(2, 2\)"),
    "lists": ([[1], [2]], r"is \[1\] \(list\)"),
    "dictionary": ({1: "a"}, "in a dict"),
    "set": ({1, 2}, "in a set"),
}


@pytest.mark.parametrize(("ids", "message"), REFUSED.values(), ids=REFUSED)
def test_ids_that_are_refused(ids, message):
    with pytest.raises(inrun.BatchError, match=message):
        as_ids(ids, None)


def test_ids_of_another_type_than_before():
    with pytest.raises(inrun.BatchError, match=r"str at position 0, and int in the batches before"):
        as_ids(["a"], int)


TARGETS = st.lists(
    STRINGS.filter(str.strip), min_size=1, max_size=4, unique_by=lambda name: name.strip()
)


def record(step, ids, E, Q):
    values = np.arange(E * Q * len(ids), dtype=float).reshape(E, Q, len(ids)) + step
    return StepEntry(step, as_ids(ids, None)[0], values, 0.1)


@given(IDS, TARGETS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_a_ledger_gives_back_ids_and_target_names(tmp_path_factory, ids, names):
    names = [name for name in names if name not in RESERVED] or ["t"]
    folder = tmp_path_factory.mktemp("ids") / "run"
    memory, store = MemoryLedger(names), Store.create(folder, {}, names, ["secant"])
    for step in range(2):
        for ledger in (memory, store):
            ledger.append(record(step, ids, 1, len(names)))
    store.close()
    saved = open_run(folder)
    columns = names if len(names) > 1 else []
    for values, history in (
        (memory.values(0), memory.history(0)),
        (saved.values(), saved.history()),
    ):
        assert values["id"].tolist() == sorted(set(ids))
        assert history["id"].tolist() == ids * 2
        assert {type(x) for x in values["id"].tolist()} == {type(ids[0])}
        assert list(values.columns) == ["id", "value", *columns, "steps", "scored"]
        assert list(history.columns) == ["step", "id", "value", *columns]
        for q, name in enumerate(columns):
            assert history[name].tolist() == [
                q * len(ids) + i + step for step in range(2) for i in range(len(ids))
            ]
    assert saved.targets == names


def watched(**options):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss": lambda m, x: m(x).square().mean()} | options
    return model, optimizer, inrun.watch(model, optimizer, **options)


@given(IDS, TARGETS)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
def test_a_run_gives_back_ids_and_target_names(ids, names):
    names = [name for name in names if name not in RESERVED] or ["t"]
    model, optimizer, run = watched(targets={name: [torch.ones(2, 3)] for name in names})
    x = torch.randn(len(ids), 3)
    with run.batch(ids):
        model(x).square().mean().backward()
    optimizer.step()
    run.close()
    assert run.values()["id"].tolist() == sorted(set(ids))
    assert run.targets == names


BAD_NAMES = {
    "empty": ({"": 1}, "empty name"),
    "blank": ({"a": 1, " \n": 1}, "empty name"),
    "twice": ({1: 1, "1": 1}, "different names.*'1'"),
    "none": ({None: 1}, "is a NoneType"),
    "bytes": ({b"a": 1}, "is a bytes"),
    "surrogate": ({"\ud800": 1}, "half a surrogate pair"),
    "reserved": ({"id": 1, "a": 1}, "'id'"),
    "nothing": ({}, "no validation data"),
}


@pytest.mark.parametrize(("targets", "message"), BAD_NAMES.values(), ids=BAD_NAMES)
def test_target_names_that_are_refused(targets, message):
    with pytest.raises((inrun.ValidationError, inrun.LedgerError), match=message):
        watched(targets={name: [torch.ones(2, 3)] for name in targets})


def test_labels_that_would_share_a_name():
    rows = [(torch.ones(3), y) for y in (0.0, float("nan"), float("nan"))]
    with pytest.raises(inrun.ValidationError, match="label of row 1 is nan"):
        inrun.by_label(rows)
    with pytest.raises(inrun.ValidationError, match="label of row 0 is None"):
        inrun.by_label([(1, None)])
    with pytest.raises(inrun.ValidationError, match="1 and '1' would both be called '1'"):
        inrun.by_label(rows, [1, "1", 2])
