"""Every test starts from the same seed, in float64, on one thread unless OMP_NUM_THREADS asks."""

import os

# Some virtual machines announce AMX and crash on it; torch's CPU kernels are told not to use it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Also for the processes that tests start: two workers on two cores get in each other's way.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.overrides import _pop_mode

pytest.register_assert_rewrite("helpers")  # failing asserts there say what was compared


@pytest.fixture(autouse=True)
def _settings():
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    left = _modes()
    while _modes():
        _pop_mode()
    assert not left, f"this test left an open batch behind: {left} follows all later ones"
