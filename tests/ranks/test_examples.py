"""The scripts in examples/ run with their launchers, at their own small size."""

import subprocess
import sys
from pathlib import Path

import pytest

import inrun

ROOT = Path(__file__).parents[2]
LAUNCH = {
    "ddp_torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "ddp_accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                       "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                       "--main_process_port", "0"],
}  # fmt: skip


SLOW = pytest.param("ddp_accelerate", [], marks=pytest.mark.slow)  # two imports of transformers
SHARDED = pytest.param("ddp_torchrun", ["--shard"], marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "more"), [("ddp_torchrun", []), SHARDED, SLOW])
def test_example(name, more, tmp_path):
    if name == "ddp_accelerate":
        pytest.importorskip("accelerate")
    script = [str(ROOT / "examples" / f"{name}.py"), "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", *LAUNCH[name], *script, "--epochs", "1", *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "512 examples, explained" in done.stdout
    run = inrun.open(tmp_path / "run")
    assert run.values()["id"].tolist() == list(range(512))
    assert run.steps()["examples"].tolist() == [32] * 16
    assert 0.9 < run.summary()["explained"] < 1.1
