"""The guides run as they stand in the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "guide-clean-a-dataset.md"


def test_the_guide_to_cleaning_a_dataset_runs_and_cleans(tmp_path):
    pytest.importorskip("sklearn", reason="the guide needs scikit-learn")
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 6
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks), "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    harm, loss = (
        float(re.search(rf"^{name} +AUROC ([\d.]+)", done.stdout, re.M)[1])
        for name in ("harm", "final loss")
    )
    assert harm > 0.95 and loss > 0.5
    accuracy = dict(re.findall(r"^(.+?) +([\d.]+)%$", done.stdout, re.M))
    assert float(accuracy["suspects removed"]) > float(accuracy["everything"])
    assert "explained" in done.stdout
    assert (tmp_path / "runs" / "noisy.html").stat().st_size > 10_000
