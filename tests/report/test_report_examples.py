"""Examples for display: every kind of file gives the same frame."""

from __future__ import annotations

import base64
import json
import struct
import zlib

import numpy as np
import pandas as pd
import pytest

from inrun.ledger import LedgerError
from inrun.report.examples import load_examples, thumbnail

TABLE = pd.DataFrame(
    {
        "id": [3, 1, 2],
        "text": ["three", "one", "two"],
        "label": [0, 1, 1],
        "source": ["a", "b", "b"],
    }
)


def write(kind, path):
    if kind == "jsonl":
        TABLE.to_json(path, orient="records", lines=True)
    elif kind == "csv":
        TABLE.to_csv(path, index=False)
    else:
        TABLE.set_index("label", drop=False).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("ids", [[1, 3, 99], ["1", "3", "99"]])
def test_examples_are_read_from_every_kind_of_table(tmp_path, kind, ids):
    found = load_examples(write(kind, tmp_path / f"e.{kind}"), ids, show=ids[:1])
    assert found["id"].tolist() == ids[:2]
    assert found["text"].tolist() == ["one", None]  # only what is shown
    assert found["label"].tolist() == ["1", "0"] and found["group"].tolist() == ["b", "a"]


def test_rows_are_ids_where_there_are_none(tmp_path):
    (tmp_path / "e.jsonl").write_text('{"sms": "hi"}\n\n{"sms": null}\n{"sms": "\\ud800"}\n')
    found = load_examples(tmp_path / "e.jsonl", [0, 1, 2])
    assert found["text"].tolist() == ["hi", None, "?"]


def decode(uri):
    """Read back what ``thumbnail`` wrote: 8 bits, no filter."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    at, body = 8, b""
    while at < len(data):
        size, tag = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            tag + content
        )
        body += content if tag == b"IDAT" else b""
        at += 12 + size
    assert depth == 8
    raw = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, -1)
    return raw[:, 1:].reshape(height, width, {0: 1, 2: 3, 6: 4}[colour]).squeeze()


def test_images_are_read_and_shown_as_they_are(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "e.npz", images=images, labels=np.arange(4))
    found = load_examples(tmp_path / "e.npz", [2, 3])
    np.testing.assert_array_equal(decode(found["image"][0]), images[2])
    assert found["label"].tolist() == ["2", "3"]
    colour = rng.integers(0, 256, (3, 10, 12), dtype=np.uint8)
    np.testing.assert_array_equal(decode(thumbnail(colour)), np.moveaxis(colour, 0, -1))
    small = decode(thumbnail(rng.random((300, 200, 3)), side=50))
    assert small.shape == (50, 34, 3) and small.max() == 255
    with pytest.raises(LedgerError, match="an image must be"):
        thumbnail(np.zeros((2, 3, 4, 5)))


def test_unreadable_examples_are_refused(tmp_path):
    file = write("csv", tmp_path / "e.csv")
    with pytest.raises(LedgerError, match=r"the run has 7, 8, the file '3', '1', '2'"):
        load_examples(file, [7, 8])
    (tmp_path / "e.docx").write_text("x")
    with pytest.raises(LedgerError, match="examples come from"):
        load_examples(tmp_path / "e.docx", [1])
    np.savez(tmp_path / "p.npz", images=np.array([{}], dtype=object))
    with pytest.raises(LedgerError, match="cannot be read as npz"):  # never unpickled
        load_examples(tmp_path / "p.npz", [0])
    (tmp_path / "l.jsonl").write_text(json.dumps([1]))
    with pytest.raises(LedgerError, match="line 1 is not an object"):
        load_examples(tmp_path / "l.jsonl", [0])


def test_examples_of_a_hugging_face_dataset_are_read(tmp_path):
    try:
        import datasets
    except ImportError:
        with pytest.raises(LedgerError, match=r"inrun\[datasets\]"):
            load_examples(tmp_path, [0])
        return
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"])
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features)
    data.save_to_disk(str(tmp_path / "d"))
    found = load_examples(tmp_path / "d", [0, 1])
    assert found["text"].tolist() == ["a", "b"] and found["label"].tolist() == ["yes", "no"]
