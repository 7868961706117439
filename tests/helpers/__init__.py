"""Models, problems, ledgers and servers that several tests share."""
