"""What is recorded of each step, in memory and on disk, and the tables made of it."""


class LedgerError(RuntimeError):
    """A ledger cannot be written, read or continued; the message says which, why, what to do."""
