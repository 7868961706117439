"""`inrun repair`: whole parts are kept, damaged ones set aside, nothing is deleted."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.ledgers import (
    as_format_1,
    assert_same,
    copy,
    damage,
    everything,
    expected,
    records,
    tables,
    write,
)
from inrun.cli.app import app
from inrun.ledger import LedgerError
from inrun.ledger.repair import repair
from inrun.ledger.saved import Store, open_run
from inrun.report.facts import facts_of

ROWS = list(records(20))


@pytest.fixture
def run(tmp_path):
    """Four parts of five steps."""
    write(tmp_path / "run", ROWS)
    return tmp_path / "run"


def create(path, **options):
    return Store.create(path, {"lr": 0.1}, ["a", "b"], ["secant"], **options)


def flip(file, at=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 16
    file.write_bytes(bytes(data))


def contents(folder):
    return sorted(everything(folder).values())


def test_a_whole_ledger_stays_as_it_is(run):
    before = everything(run)
    result = repair(run)
    assert len(result.parts) == 4 and not (result.aside or result.lost or result.notes)
    assert everything(run) == before
    again = CliRunner().invoke(app, ["repair", str(run)])
    assert again.exit_code == 0 and "4 parts whole: 20 steps" in again.output
    assert "nothing to repair" in again.output


def test_watch_never_deletes_what_no_manifest_names(tmp_path):
    """Parts of a folder that is no run of ours; parts without a manifest; parts of another hand."""
    other = tmp_path / "other"
    (other / "values").mkdir(parents=True)
    (other / "values" / "part-000000.parquet").write_text("somebody's")
    before = everything(other)
    with pytest.raises(LedgerError, match=r"holds other files \(values/part-000000.parquet\)"):
        create(other)
    assert everything(other) == before
    write(tmp_path / "run", ROWS)
    (tmp_path / "run" / "manifest.json").unlink()
    before = everything(tmp_path / "run")
    for use in (create, open_run, lambda p: create(p, overwrite=True)):
        with pytest.raises(LedgerError, match=r"has no manifest.json.*`inrun repair "):
            use(tmp_path / "run")
    assert everything(tmp_path / "run") == before


@pytest.mark.parametrize(
    "name", ["part-000099.parquet", "part-000099.parquet.tmp", "part-1.parquet"]
)
def test_parts_that_the_manifest_does_not_name_are_not_touched(run, name):
    (run / "values" / name).write_text("somebody's")
    (run / "values" / "notes.txt").write_text("mine")
    before = everything(run)
    with pytest.raises(LedgerError, match=r"part-.* manifest.json does not name.*inrun repair"):
        create(run)
    assert everything(run) == before
    assert_same(tables(open_run(run)), expected(ROWS))
    assert repair(run).aside == {name.split(".")[0]: "not named by manifest.json"}
    assert (run / "damaged" / "values" / name).read_text() == "somebody's"
    create(run).close()
    assert (run / "values" / "notes.txt").read_text() == "mine"
    assert_same(tables(open_run(run)), expected(ROWS))


@pytest.mark.parametrize("how", ["gone", "garbage", "flipped"])
def test_a_manifest_is_made_again(run, how):
    file, before = run / "manifest.json", json.loads((run / "manifest.json").read_text())
    if how == "gone":
        file.unlink()
    elif how == "garbage":
        file.write_text("{")
    else:
        flip(file)
    with pytest.raises(LedgerError, match="inrun repair"):
        tables(open_run(run))
    result = repair(run)
    assert len(result.parts) == 4 and not result.aside and not result.lost and result.notes
    after = json.loads(file.read_text())
    assert {k: after[k] for k in ("ids", "parts", "next")} == {
        k: before[k] for k in ("ids", "parts", "next")
    }
    assert_same(tables(open_run(run)), expected(ROWS))


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("kind", ["values", "steps"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "garbage"])
def test_a_damaged_part_does_not_block_the_others(run, manifest, kind, how):
    file = run / kind / "part-000001.parquet"
    if how == "flipped":
        flip(file, 60)
    elif how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:300] if how == "cut" else b"\0" * 1000)
    if manifest:
        with pytest.raises(LedgerError, match=r"part-000001.parquet.*`inrun repair "):
            tables(open_run(run))
    else:
        (run / "manifest.json").unlink()
    kept = [d for n, d in everything(run).items() if n != "manifest.json"]
    result = CliRunner().invoke(app, ["repair", str(run), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["parts"] == 3 and list(told["aside"]) == ["part-000001"]
    known = manifest or (kind == "values")
    assert told["lost"][0]["first"] == (5 if known else None)
    now = [d for n, d in everything(run).items() if n != "manifest.json"]
    assert sorted(kept) == sorted(now)  # nothing deleted
    with pytest.warns(UserWarning, match="steps 5 to 9" if known else "steps of part-000001"):
        saved = open_run(run)
    assert_same(tables(saved), expected(ROWS[:5] + ROWS[10:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not repair(run).aside  # nothing more to do


def repaired_after_damage(run, work, rounds, seed):
    """Whatever happens to the files of one part, with the manifest or without: no wrong number."""
    rng = np.random.default_rng(seed)
    whole, rest = expected(ROWS), expected(ROWS[:5] + ROWS[10:])
    aside = 0
    for i in range(rounds):
        folder = copy(run, work / str(i))
        file = folder / ("values", "steps")[i % 2] / "part-000001.parquet"
        file.write_bytes(damage(file.read_bytes(), rng))
        if i % 3:
            (folder / "manifest.json").unlink()
        aside += (gone := bool(repair(folder).aside))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(tables(open_run(folder)), rest if gone else whole)
    return aside


def test_repaired_after_damage(run, tmp_path):
    assert repaired_after_damage(run, tmp_path, 20, 0) > 10


@pytest.mark.slow
def test_repaired_after_much_damage(run, tmp_path):
    assert repaired_after_damage(run, tmp_path, 80, 1) > 40


def test_a_repaired_ledger_is_continued(run, tmp_path):
    store = create(run)
    state = store.state_dict()
    store._merge = lambda above: None
    more = list(records(4, seed=3, first=20))
    for row in more:
        store.append(row)
    store.close()
    flip(run / "values" / "part-000002.parquet")
    repair(run)
    for change in ("same", "unknown"):
        folder = copy(run, tmp_path / change)
        if change == "unknown":
            (folder / "manifest.json").unlink()
            (folder / "damaged" / "values" / "part-000002.parquet").rename(
                folder / "values" / "part-000002.parquet"
            )
            repair(folder)
        with pytest.warns(UserWarning, match="set aside by inrun repair"):
            store = create(folder)
        store.load_state_dict(state)
        store.append(more[0])
        store.close()
        assert_same(tables(store, 0), expected(ROWS[:10] + ROWS[15:] + more[:1]))


def test_without_a_manifest_the_later_of_two_parts_counts(run):
    """A merge that was killed before it deleted the small parts."""
    before = everything(run)
    store = create(run)
    store.close()  # merges
    (run / "manifest.json").unlink()
    for name, data in before.items():
        if name.startswith(("values", "steps")):
            (run / name).write_bytes(data)
    result = repair(run)
    assert [p.name for p in result.parts] == ["part-000004"]
    assert set(result.aside.values()) == {"replaced by part-000004"} and not result.lost
    assert_same(tables(open_run(run)), expected(ROWS))


def test_a_file_with_the_highest_number_does_not_end_the_numbering(run):
    (run / "manifest.json").unlink()
    (run / "values" / f"part-{'9' * 18}.parquet").write_bytes(b"of somebody else")
    assert set(repair(run).aside) == {f"part-{'9' * 18}"}
    with pytest.warns(UserWarning, match="the tables leave them out"):
        store = create(run)
    store.append(next(records(1, first=20)))
    store.close()
    with pytest.warns(UserWarning, match="the tables leave them out"):
        assert open_run(run).steps()["step"].tolist() == list(range(21))


def test_parts_of_another_run_are_set_aside(run, tmp_path):
    write(tmp_path / "other", list(records(5, seed=9, first=40)))
    for kind in ("values", "steps"):
        (tmp_path / "other" / kind / "part-000000.parquet").rename(
            run / kind / "part-000007.parquet"
        )
    (run / "manifest.json").unlink()
    assert repair(run).aside == {"part-000007": "it belongs to another run"}
    assert_same(tables(open_run(run)), expected(ROWS))


def test_format_1_gets_its_checksums(run):
    as_format_1(run)
    assert len(repair(run).parts) == 4
    assert_same(tables(open_run(run)), expected(ROWS))
    flip(run / "values" / "part-000002.parquet")
    with pytest.raises(LedgerError, match="does not match its checksum"):
        open_run(run).values()


def test_an_edited_run_json_is_accepted_on_request(run):
    file = run / "run.json"
    file.write_text(file.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    assert "run.json did not match its checksum" in repair(run).notes[0]
    assert open_run(run).info["config"] == {"lr": 0.2}


def test_what_repair_refuses(run, tmp_path):
    with pytest.raises(LedgerError, match="no such folder"):
        repair(tmp_path / "nowhere")
    store = create(run)
    with pytest.raises(LedgerError, match="being written by process"):
        repair(run)
    store.close()
    (run / "run.json").unlink()
    before = everything(run)
    result = CliRunner().invoke(app, ["repair", str(run)])
    assert result.exit_code == 2 and "has no run.json" in result.output
    assert everything(run) == before


def test_the_size_of_a_ledger_is_that_of_its_parts(run, tmp_path):
    """Other files may come and go meanwhile, or lead nowhere."""
    size = open_run(run).bytes
    assert size == sum(f.stat().st_size for f in run.rglob("*.parquet"))
    (run / "values" / "other.parquet").symlink_to(tmp_path / "nowhere")
    assert facts_of(open_run(run))["bytes"] == size
