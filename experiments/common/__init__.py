"""What the experiments share: parts and resuming, models, data, the local game, statistics."""
