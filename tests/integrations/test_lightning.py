"""Lightning: automatic and manual optimization, accumulation, clipping, resuming, against the loop
written out."""

import logging
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import inrun
from helpers import lightning_ranks
from helpers.ranks import in_ranks

pl = pytest.importorskip("lightning.pytorch", reason="needs the extra inrun[lightning]")
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice
              pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]  # fmt: skip
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 4, generator=GENERATOR, dtype=torch.float64), torch.arange(24) % 3


class Automatic(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        found = self.loss(batch)
        self.log("train_loss", found)
        return found

    def validation_step(self, batch, batch_idx):
        found = self.loss(batch)
        self.log("val_loss", found)
        return found

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Automatic):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.2, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Twice(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))


class Two(Manual):
    """An optimizer and a schedule for each of two layers."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(3, 3)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.second(torch.tanh(self.net(batch[0]))), batch[1])

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            schedule.step()

    def configure_optimizers(self):
        made = [torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9),
                torch.optim.AdamW(self.second.parameters(), lr=1e-2)]  # fmt: skip
        return made, [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in made]


def held_out():
    return DataLoader(TensorDataset(X[:8], Y[:8]), 8)


def fit(module=Automatic, watch=True, epochs=2, ckpt_path=None, folder=None, **options):
    torch.manual_seed(1)
    model, callback = module(), None
    if watch:
        out = None if folder is None else folder / "ledger"
        callback = inrun.integrations.lightning.Watch(held_out(), out=out, max_norm=0.2)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=1,
        callbacks=[callback] if watch else [], **options,
    )  # fmt: skip
    data = TensorDataset(X, Y)
    loader = DataLoader(inrun.with_ids(data) if watch else data, batch_size=4)
    trainer.fit(model, loader, held_out(), ckpt_path=ckpt_path)
    return model, callback, trainer


def by_hand(accumulation):
    torch.manual_seed(1)
    model = Automatic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = inrun.watch(model, optimizer, validation=[(X[:8], Y[:8])], max_norm=0.2,
                      loss=lambda m, b: m.loss(b))  # fmt: skip
    for _ in range(2):
        for k in range(6):
            rows = torch.arange(4 * k, 4 * k + 4)
            with run.batch(rows):
                (model.loss((X[rows], Y[rows])) / accumulation).backward()
            if k % accumulation == accumulation - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()
    run.close()
    return model, run


CASES = {
    "automatic": (Automatic, 1, {"gradient_clip_val": 0.2}),
    "accumulated": (Automatic, 2, {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}),
    "manual": (Manual, 2, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_loop_written_out(name):
    module, accumulation, options = CASES[name]
    plain, _, before = fit(module, watch=False, **options)
    model, watch, trainer = fit(module, **options)
    twin, run = by_hand(accumulation)
    for a, b, c in zip(plain.parameters(), model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(b, c, rtol=1e-12, atol=1e-14)
    a, b = (r.history().sort_values(["step", "id"]) for r in (watch.run, run))
    np.testing.assert_allclose(a["value"], b["value"], rtol=1e-9)
    assert "training_step" not in vars(model) and "log" not in vars(model)
    for key, value in before.callback_metrics.items():
        assert torch.equal(trainer.callback_metrics[key], value)
    assert float(trainer.callback_metrics["inrun_sum"]) == pytest.approx(run.tally.total, rel=1e-5)


def test_manual_steps_of_two_optimizers():
    plain, _, _ = fit(Two, watch=False)
    model, watch, _ = fit(Two)
    torch.manual_seed(1)
    twin = Two()
    optimizers, schedules = twin.configure_optimizers()
    run = inrun.watch(twin, optimizers, validation=[(X[:8], Y[:8])], loss=lambda m, b: m.loss(b))
    for k in range(12):
        rows = torch.arange(4 * (k % 6), 4 * (k % 6) + 4)
        twin.zero_grad()
        with run.batch(rows):
            twin.loss((X[rows], Y[rows])).backward()
        for each in (*optimizers, *schedules):
            each.step()
    run.close()
    assert watch.run.steps()["void"].isna().all()
    for a, b, c in zip(*(m.parameters() for m in (plain, model, twin)), strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)
    a, b = (r.history().sort_values(["step", "id"]) for r in (watch.run, run))
    np.testing.assert_allclose(a["value"], b["value"], rtol=1e-9)


def test_resumed(tmp_path):
    whole, watch, _ = fit(gradient_clip_val=0.2)
    _, first, trainer = fit(gradient_clip_val=0.2, epochs=1, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    model, again, _ = fit(gradient_clip_val=0.2, folder=tmp_path, ckpt_path=tmp_path / "last.ckpt")
    assert first.run.step == 6 and again.run.step == 12
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    np.testing.assert_array_equal(again.run.values()["value"], watch.run.values()["value"])
    assert (tmp_path / "ledger/report.html").is_file()


class BatchAlone(Automatic):
    def validation_step(self, batch):
        self.print("not heard in validation passes of ours")
        return {"loss": self.loss(batch)}


class ManyLoaders(Automatic):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        return self.loss(batch)


def fit_alone(module, **options):
    """Train an epoch without validation loops of Lightning's own."""
    torch.manual_seed(1)
    watched = inrun.integrations.lightning.Watch(**options)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_model_summary=False, enable_progress_bar=False,
                         callbacks=[watched])  # fmt: skip
    trainer.fit(module(), DataLoader(inrun.with_ids(TensorDataset(X, Y)), batch_size=4))
    return watched.run.history()


@pytest.mark.parametrize("module", [BatchAlone, ManyLoaders])
def test_a_validation_step_gets_the_numbers_that_it_takes(module, capsys):
    found = fit_alone(module, validation=held_out())
    assert "not heard" not in capsys.readouterr().out
    assert found.equals(fit_alone(Automatic, validation=held_out()))


def test_targets_whose_loader_has_a_number_are_refused():
    targets = {"a": held_out(), "b": held_out()}
    with pytest.raises(inrun.ValidationError, match="takes a dataloader_idx"):
        fit_alone(ManyLoaders, targets=targets)
    loss = lambda module, batch: module.validation_step(batch, 0, 0)  # noqa: E731
    assert len(fit_alone(ManyLoaders, targets=targets, loss=loss)) == 24


def test_watch_without_validation_data_is_refused_at_once():
    with pytest.raises(inrun.ValidationError, match="valued by"):
        inrun.integrations.lightning.Watch()


def test_two_backward_passes_are_refused():
    with pytest.raises(inrun.BatchError, match="ran backward twice"):
        fit(Twice)


def test_a_batch_without_ids_is_refused():
    watch = inrun.integrations.lightning.Watch(held_out())
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_model_summary=False,
                         enable_checkpointing=False, enable_progress_bar=False,
                         callbacks=[watch])  # fmt: skip
    model = Automatic()
    with pytest.raises(inrun.BatchError, match=r"inrun.with_ids\(dataset\)"):
        trainer.fit(model, held_out(), held_out())
    assert "training_step" not in vars(model)


def test_two_processes_have_the_values_of_one(tmp_path):
    ranks = in_ranks(2, lightning_ranks.launched, str(tmp_path))
    _, alone = lightning_ranks.fit()
    together = inrun.open(tmp_path)
    a, b = (r.history().sort_values(["step", "id"]) for r in (alone, together))
    assert a["id"].tolist() == b["id"].tolist() and len(a) == 48
    np.testing.assert_allclose(b["value"], a["value"], rtol=1e-9, atol=1e-14)
    for plain, watched, steps, seen in ranks:
        assert all(map(np.array_equal, plain, watched)) and seen == 24
        np.testing.assert_allclose(steps["sum"], alone.steps()["sum"], rtol=1e-9)


def test_without_lightning_the_extra_is_named(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "inrun.integrations.lightning", raising=False)
    monkeypatch.delattr(inrun.integrations, "lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'inrun\[lightning\]'"):
        _ = inrun.integrations.lightning
