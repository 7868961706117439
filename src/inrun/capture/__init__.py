"""Watches forward and backward pass: where parameters meet examples, and what is kept of it."""
