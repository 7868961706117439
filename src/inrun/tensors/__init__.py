"""Where the examples are in a tensor, and how operations move them."""
