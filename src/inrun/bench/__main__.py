"""``python -m inrun.bench``: the command by itself, which needs torch but no ledger on disk."""

from inrun.__main__ import main

if __name__ == "__main__":
    main("inrun.bench.command:app")
