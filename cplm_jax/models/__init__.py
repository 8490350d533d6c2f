"""The decoder and its copy head, as Flax NNX modules."""
