"""Training in several processes: what the world is, sums over ranks, what ranks agree on."""
