"""From gradients to values: received, update map, validation, contraction, audit, conclusion."""
