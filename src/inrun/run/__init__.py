"""The training loop's side: ``watch``, ``Run``, what they accept and what they refuse."""
