"""Ids stay with their rows: shuffled, split, in workers, through every kind of collator."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

import inrun
from helpers.trainers import documents, padded
from inrun.ids import ID, OWNER

ROWS = documents(12, seed=3)


class Stream(IterableDataset):
    """Rows in an order of its own, each worker its share."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        return (ROWS[i] for i in self.order[first::by])


class Many(Dataset):
    """Gives a whole batch at once, as Hugging Face's datasets do."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"x": torch.tensor(float(i))}

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def seen(loader):
    """id → the first tokens of its row, over a pass."""
    found = {}
    for batch in loader:
        names, batch = inrun.take_ids(batch)
        for key, tokens in zip(names["ids"].tolist(), batch["input_ids"], strict=True):
            found[key] = tokens[:4].tolist()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_an_index_stays_with_its_row(workers):
    data = inrun.with_ids(ROWS)
    torch.manual_seed(3)
    loader = DataLoader(
        data, 4, shuffle=True, num_workers=workers, collate_fn=inrun.carry_ids(padded)
    )
    wanted = {i: row["input_ids"][:4] for i, row in enumerate(ROWS)}
    assert seen(loader) == seen(loader) == wanted
    part, _ = random_split(data, [5, 7])
    some = seen(DataLoader(part, 2, collate_fn=inrun.carry_ids(padded)))
    assert len(some) == 5 and some.items() <= wanted.items()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_named_by_what_its_rows_hold(workers):
    wanted = {inrun.row_id(row): row["input_ids"][:4] for row in ROWS}
    assert len(wanted) == len(ROWS)
    for order in (list(range(12)), list(range(11, -1, -1))):
        loader = DataLoader(
            inrun.with_ids(Stream(order)), 3, num_workers=workers,
            collate_fn=inrun.carry_ids(padded),
        )  # fmt: skip
        assert seen(loader) == wanted


def test_rows_that_are_tuples_become_pairs():
    data = inrun.with_ids(TensorDataset(torch.arange(6.0), torch.arange(6)))
    for batch in DataLoader(data, 3):
        names, (x, y) = inrun.take_ids(batch)
        ids, (x2, _) = batch  # and so for a loop that unpacks
        assert names["ids"].tolist() == ids.tolist() == y.tolist() == x2.tolist()
    assert (
        data[-1].id == 5 and len(data) == 6 and data.tensors[0].tolist() == x.new(range(6)).tolist()
    )


def test_rows_asked_for_together():
    batch = next(iter(DataLoader(inrun.with_ids(Many()), 3)))
    assert batch[ID].tolist() == [0, 1, 2] and batch["x"].tolist() == [0, 1, 2]


def test_ids_of_ones_own():
    names = [f"doc-{i}" for i in range(12)]
    first = inrun.with_ids(ROWS, ids=names)
    assert first[3][ID] == "doc-3"
    assert (
        inrun.with_ids(ROWS, ids=lambda row: row["input_ids"][0])[2][ID] == ROWS[2]["input_ids"][0]
    )
    named = [{"key": np.int64(7 + i), "x": i} for i in range(3)]
    assert [row[ID] for row in inrun.with_ids(named, ids="key")] == [7, 8, 9]
    batch = inrun.carry_ids(padded)([first[0], first[1]])
    assert batch[ID] == ["doc-0", "doc-1"]


@pytest.mark.parametrize(
    ("call", "why"),
    [(lambda: inrun.with_ids(DataLoader(ROWS)), "not the loader"),
     (lambda: inrun.with_ids({"train": ROWS}), "one split"),
     (lambda: inrun.with_ids(3), "takes a dataset"),
     (lambda: inrun.with_ids(Stream([0]), ids=[1, 2]), "no order to number"),
     (lambda: inrun.row_id({"x": object()}), "no hash that stays the same")],
)  # fmt: skip
def test_what_has_no_ids_is_refused(call, why):
    with pytest.raises(TypeError, match=why):
        call()


def test_as_many_ids_as_rows():
    with pytest.raises(ValueError, match="2 ids for 12 rows"):
        inrun.with_ids(ROWS, ids=[1, 2])
    with pytest.raises(inrun.BatchError, match="wrap the dataset"):
        inrun.carry_ids(padded)(ROWS[:2])
    with pytest.raises(inrun.BatchError, match="has no ids"):
        inrun.take_ids(padded(ROWS[:2]))


def test_a_hash_depends_on_all_of_a_row_and_on_nothing_else():
    row = {"a": [1, 2], "b": "x", "c": None, "d": torch.ones(2, dtype=torch.bfloat16), "e": 1.5}
    again = {k: row[k] for k in reversed(row)}
    assert inrun.row_id(row) == inrun.row_id(again) == inrun.row_id({**row, ID: 3})
    others = [{**row, "a": [12]}, {**row, "b": "y"}, {**row, "c": 0}, {**row, "d": torch.ones(2)},
              {**row, "d": torch.ones(2, 1, dtype=torch.bfloat16)},
              {**row, "e": np.ones(3)}]  # fmt: skip
    assert len({inrun.row_id(x) for x in [row, *others]}) == 7
    assert inrun.row_id("ab") == 2078210268704794530  # in every process and version


# Collators


def flattened(rows):
    tokens = [t for r in rows for t in r["input_ids"]]
    return {"input_ids": torch.tensor([[*tokens, 2, 2]])}  # padded to a multiple


def test_rows_one_after_the_other():
    rows = [{**row, ID: 10 + i} for i, row in enumerate(ROWS[:3])]
    names, batch = inrun.take_ids(inrun.carry_ids(flattened)(rows))
    sizes = [len(r["input_ids"]) for r in rows]
    wanted = [k for k, n in enumerate(sizes) for _ in range(n)] + [-1, -1]
    assert names["ids"].tolist() == [10, 11, 12] and names["owner"].tolist() == [wanted]
    assert OWNER not in batch and ID not in batch
    with pytest.raises(inrun.BatchError, match="not by putting"):
        inrun.carry_ids(lambda rows: flattened(rows[::-1]))(rows)


@pytest.mark.parametrize("flat", [True, False])
def test_packed_rows_have_an_id_for_each_document(flat):
    docs = [row["input_ids"] for row in ROWS[:5]]
    packs = [docs[:2], docs[2:]]
    rows = []
    for i, pack in enumerate(packs):
        tokens = [t for d in pack for t in d]
        lengths = [len(d) for d in pack]
        rows.append({"input_ids": tokens, "labels": tokens, "seq_lengths": lengths, ID: i})
    names, batch = inrun.take_ids(inrun.carry_ids(flattened if flat else padded)(rows))
    assert names["ids"].tolist() == [inrun.row_id(d) for d in docs]
    for k, d in enumerate(docs):
        assert batch["input_ids"][names["owner"] == k].tolist() == d
    left = batch["input_ids"][names["owner"] < 0]
    assert (left == 2).all()


def pairs(rows, order=("chosen_ids", "rejected_ids")):
    made = [{"input_ids": r["prompt_ids"] + r[key]} for key in order for r in rows]
    for row in made:
        row["labels"] = row["input_ids"]
    return padded(made)


def test_preference_pairs_are_one_example_each():
    rows = [
        {"prompt_ids": a["input_ids"], "chosen_ids": b["input_ids"], "rejected_ids": [5], ID: i}
        for i, (a, b) in enumerate(zip(ROWS[:3], ROWS[3:6], strict=True))
    ]
    names, _ = inrun.take_ids(inrun.carry_ids(pairs)(rows))
    assert names["owner"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(inrun.BatchError, match="not the chosen answers first"):
        inrun.carry_ids(lambda r: pairs(r, ("rejected_ids", "chosen_ids")))(rows)


def test_other_numbers_of_rows_are_refused_unless_the_collator_says_whose():
    rows = [{**row, ID: i} for i, row in enumerate(ROWS[:4])]
    with pytest.raises(inrun.BatchError, match="made 3 rows of 4 examples"):
        inrun.carry_ids(lambda rows: padded(rows[:3]))(rows)
    owner = torch.tensor([0, 1, 3])
    batch = inrun.carry_ids(lambda rows: {**padded(rows[:3]), OWNER: owner})(rows)
    assert inrun.take_ids(batch)[0]["owner"] is owner


def test_datasets_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="needs the extra inrun[datasets]")
    data = inrun.with_ids(datasets.Dataset.from_list(ROWS))
    assert inrun.with_ids(data) is data
    shuffled = data.shuffle(seed=2).filter(lambda row: len(row["input_ids"]) > 5)
    assert shuffled[ID] != list(range(12))
    assert all(ROWS[row[ID]]["input_ids"] == row["input_ids"] for row in shuffled)
    streamed = inrun.with_ids(datasets.Dataset.from_list(ROWS).to_iterable_dataset(3))
    wanted = {inrun.row_id(row): row["input_ids"] for row in ROWS}
    assert {row[ID]: row["input_ids"] for row in streamed.shuffle(seed=3, buffer_size=4)} == wanted
