"""Runs comparisons of Triton kernels with plain code, interpreted where there is no GPU.

The interpreter must be chosen before Triton is imported, so a test file runs itself as a script in
a process of its own, prints the errors that it found, and asserts them in the first process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 1024  # numbers per program: fewer than usual, the interpreter is slow
# odd sizes and multiples of 16, which are read in another way; some over a chunk
SHAPES = [(3,), (CHUNK + 1,), (32, 48), (17, 31), (1,), (16,), (10, 13), (8,), (CHUNK,)]


def errors_of(script):
    """What the test file ``script`` prints when it is run: errors by case."""
    env = os.environ | ({"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {})
    paths = [str(Path(__file__).parents[1]), *sys.path]  # helpers; inrun as it is imported here
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def prepare():
    """At the start of the script: small chunks, new tensors on the device, kernels without a GPU
    where they are interpreted."""
    from inrun import kernels

    kernels.CHUNK = CHUNK
    if DEVICE == "cpu":
        kernels.usable = lambda tensors: True
        kernels.reachable = lambda tensor: True
    torch.set_default_device(DEVICE)
