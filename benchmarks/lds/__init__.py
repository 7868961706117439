"""Which credit predicts what retraining on half of the data does? ``python -m benchmarks.lds``."""
