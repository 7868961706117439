"""bfloat16 products without AMX: some virtual machines announce it and then refuse it (SIGILL)."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # read at the first product
