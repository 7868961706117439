"""The same inside graphs that ``torch.compile`` made."""
