"""Validation data as they come: datasets of rows, single batches, splits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import inrun
from inrun.validation.balance import balanced_order, labels_of
from inrun.validation.targets import ROWS

N = 2 * ROWS + 5
X = np.random.default_rng(0).normal(size=(N, 4))
Y = np.random.default_rng(1).integers(0, 3, N)


class Rows:
    """As datasets.Dataset: rows by number, columns by name, no torch class."""

    def __init__(self, columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i):
        if isinstance(i, str):
            return self.columns[i]
        return {name: column[i] for name, column in self.columns.items()}


def loss(model, batch):
    x, y = batch.values() if isinstance(batch, dict) else batch
    return F.cross_entropy(model(x), y)


def values(validation):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with inrun.watch(model, optimizer, validation=validation, loss=loss) as run:
        for step in range(4):  # over the end of the validation data
            x, y = torch.tensor(X[step : step + 6]), torch.tensor(Y[step : step + 6])
            with run.batch(range(6)):
                loss(model, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.history()["value"].to_numpy()


DATASETS = {
    "rows of lists": Rows({"x": X.tolist(), "y": Y.tolist()}),
    "rows of arrays": Rows({"x": X, "y": Y}),
    "rows of tensors": Rows({"x": torch.tensor(X), "y": torch.tensor(Y)}),
    "tensors": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "a part": Subset(TensorDataset(torch.tensor(X), torch.tensor(Y)), range(N)),
}


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
def test_a_dataset_is_drawn_in_batches_of_rows(dataset):
    order = balanced_order(dataset, 0)
    assert sorted(order) == list(range(N))  # every row once
    x, y = torch.tensor(X)[order], torch.tensor(Y)[order]
    assert np.array_equal(
        values(dataset), values(list(zip(x.split(ROWS), y.split(ROWS), strict=True)))
    )


def test_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    assert np.array_equal(values(dataset), values(DATASETS["rows of lists"]))
    with pytest.raises(inrun.ValidationError, match=r"dataset\['test'\]"):
        values(datasets.DatasetDict({"test": dataset}))
    with pytest.raises(inrun.ValidationError, match="single rows"):
        values(dataset.to_iterable_dataset())


class Stream:
    column_names = ("x", "y")

    def __iter__(self):
        yield {"x": X[0], "y": Y[0]}


class Batched(IterableDataset):
    def __iter__(self):
        yield torch.tensor(X[:6]), torch.tensor(Y[:6])


def test_an_iterable_dataset_is_a_loader():
    expected = values([(torch.tensor(X[:6]), torch.tensor(Y[:6]))])
    assert np.array_equal(values(Batched()), expected)
    assert np.array_equal(values(DataLoader(Batched(), batch_size=None)), expected)


REFUSED = {
    "text": (Rows({"text": ["a", "b"], "y": [0, 1]}), "'text' is a str.*collate_fn"),
    "nothing": (Rows({"x": [None, None]}), "'x' is a NoneType"),
    "lengths": (Rows({"ids": [[1, 2], [1, 2, 3]]}), "batches of 32.*pads"),
    "words": (Rows({"words": [["a", "b"], ["c", "d"]]}), "batches of 32.*Tokenise"),
    "empty": (Rows({"x": []}), "is empty"),
    "stream": (Stream(), "streamed dataset .*DataLoader"),
    "splits": ({"train": Rows({"x": X}), "test": Rows({"x": X})}, r"dataset\['train'\]"),
    "one batch": ({"x": torch.tensor(X), "y": torch.tensor(Y)}, r"put it into a list: \[batch\]"),
    "number": (7, "not int"),
}


@pytest.mark.parametrize(("validation", "message"), REFUSED.values(), ids=REFUSED)
def test_data_that_is_refused(validation, message):
    with pytest.raises(inrun.ValidationError, match=message):
        values(validation)


class Pictures(torch.utils.data.Dataset):
    """As torchvision's: labels beside the rows, which are costly to read."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        raise AssertionError("no row is read to see the labels")


@pytest.mark.parametrize("n", [40, 333])
def test_cycled_rows_have_their_labels_in_balance(n):
    labels = sorted(np.random.default_rng(n).choice(3, n, p=[0.6, 0.3, 0.1]).tolist())
    order = balanced_order(Pictures(labels), 0)
    assert sorted(order) == list(range(n))
    assert order == balanced_order(Pictures(labels), 0) != balanced_order(Pictures(labels), 1)
    seen = np.array(labels)[order]
    for k in range(3):
        share = (seen == k).mean()
        for start in range(n - 20):
            assert abs((seen[start : start + 20] == k).sum() - 20 * share) < 2


def test_labels_are_seen_or_rows_are_shuffled():
    y = torch.arange(12) % 3
    x = torch.zeros(12, 2)
    for dataset in (TensorDataset(x, y), Subset(TensorDataset(x, y), range(12)), Pictures(y)):
        assert labels_of(dataset).tolist() == y.tolist()
    assert labels_of(Subset(TensorDataset(x, y), [1, 2])).tolist() == [1, 2]
    for other in (TensorDataset(y, x), TensorDataset(y, x[:, 0]), Rows({"x": x})):
        assert labels_of(other) is None  # rows of numbers, real numbers, nothing to see
        order = balanced_order(other, 0)
        assert sorted(order) == list(range(12)) != order
