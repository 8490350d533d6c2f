"""The training loop and what it needs: step, optimizer, checkpoints, metrics, signals."""
