"""Semantic variants of training examples (Appendix E of the paper): the queries of Table 2.

Data flows one way: sources → prompts → client (cached replies) → filters → output file.
"""

from inrun.variants.check import check
from inrun.variants.client import Endpoint
from inrun.variants.files import Source, VariantsError, read_sources
from inrun.variants.generate import Outcome, Settings, generate
from inrun.variants.tokens import Names, find_names

__all__ = [
    "Endpoint",
    "Names",
    "Outcome",
    "Settings",
    "Source",
    "VariantsError",
    "check",
    "find_names",
    "generate",
    "read_sources",
]
