"""Losses and gradients of the targets; nothing they touch is left changed."""
