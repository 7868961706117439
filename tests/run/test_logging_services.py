"""``run.log_to`` with the real W&B (offline), MLflow and trackio, each read back from its files.
TensorBoard is in test_logging.py, which also has stand-ins for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import inrun

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the services' own
              pytest.mark.filterwarnings("ignore::FutureWarning"),
              pytest.mark.filterwarnings("ignore::UserWarning"),
              pytest.mark.filterwarnings("ignore::ResourceWarning")]  # fmt: skip


def trained(**log):
    """A run of 12 steps that logs every 6 of them; the suspects that it ends with."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(20, 4)
    run = inrun.watch(
        model, optimizer, validation=[x[:5]], loss=lambda m, x: m(x).square().mean(), audit_every=3
    )
    assert run.log_to(every=6, suspects=3, **log) is run
    for step in range(12):
        rows = torch.arange(step % 5, 20, 5)
        with run.batch([f"row {i}" for i in rows.tolist()]):
            F.mse_loss(model(x[rows]), torch.ones(len(rows), 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    ranked = run.harm().dropna().sort_values("harm", ascending=False)["id"].head(3).tolist()
    return run, ranked


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra inrun[wandb]")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="inrun-test") as service:
        service.log({"theirs": 1.0})
        run, suspects = trained(wandb=True)
        service.log({"theirs": 2.0})  # their own counter went on
        summary, folder = dict(service.summary), service.dir
    assert summary["inrun/step"] == 11 and summary["theirs"] == 2.0
    assert summary["inrun/explained"] == pytest.approx(run.tally.explained)
    assert summary["inrun/sum of values"] == pytest.approx(run.tally.total)
    tables = sorted(Path(folder).rglob("suspects_*.table.json"), key=lambda p: p.stat().st_mtime)
    assert len(tables) == 2  # one for each time
    table = json.loads(tables[-1].read_text("utf-8"))
    assert [row[table["columns"].index("id")] for row in table["data"]] == suspects


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra inrun[mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as service:
            run, suspects = trained(mlflow=True)
        client = mlflow.MlflowClient()
        history = client.get_metric_history(service.info.run_id, "inrun/explained")
        text = mlflow.artifacts.load_text(f"{service.info.artifact_uri}/inrun/suspects.md")
    finally:
        mlflow.set_tracking_uri(before)
    assert [m.step for m in history] == [5, 11]
    assert history[-1].value == pytest.approx(run.tally.explained)
    rows = [line.split("|")[1].strip() for line in text.splitlines()[2:]]
    assert rows == suspects


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="needs the extra inrun[trackio]")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)  # read when it was imported
    trackio.init(project="inrun-test", name="one")
    run, suspects = trained(trackio=True)
    trackio.finish()
    entries = sqlite_storage.SQLiteStorage.get_logs("inrun-test", "one")
    assert [e["inrun/step"] for e in entries] == [5, 11]
    assert entries[-1]["inrun/explained"] == pytest.approx(run.tally.explained)
    assert [row["id"] for row in entries[-1]["inrun/suspects"]["_value"]] == suspects
