"""Slow, obvious definitions: the oracle of the tests and of ``run.check()``."""
