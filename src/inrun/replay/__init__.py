"""Forward and backward passes that are recorded as CUDA graphs and replayed."""
