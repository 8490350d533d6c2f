"""Blockwise computations whose memory grows with the length, not with its square or the vocabulary."""
