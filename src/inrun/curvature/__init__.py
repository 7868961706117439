"""The curvature of the training loss, from the per-example gradients of the run itself."""
