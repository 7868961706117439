"""The experiments are found from the root of the checkout, as `inrun reproduce` finds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
