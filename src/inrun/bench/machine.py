"""Describes the machine and the versions that numbers were measured with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import inrun


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": None,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "inrun": inrun.__version__,
        "transformers": metadata.version("transformers") if "transformers" in sys.modules else None,
    }


def commit() -> str | None:
    """Returns the commit of the checkout that this code is in, with a plus if it was changed since.
    INRUN_COMMIT overrides it, for copies of the code without their history."""
    if told := os.environ.get("INRUN_COMMIT"):
        return told
    here = Path(inrun.__file__).parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)
        except OSError:  # no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed inside somebody else's checkout
    found = git("rev-parse", "HEAD")
    return found if not found or not git("status", "--porcelain", ".") else f"{found}+"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = info.exists() and re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()
