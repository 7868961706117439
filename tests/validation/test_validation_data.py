"""Validation data as they come: datasets of rows, single batches, splits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import inrun
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
    pairs = list(zip(torch.tensor(X).split(ROWS), torch.tensor(Y).split(ROWS), strict=True))
    assert np.array_equal(values(dataset), values(pairs))


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
