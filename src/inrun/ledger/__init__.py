"""What is recorded: in memory and on disk."""
