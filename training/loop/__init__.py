"""The training loop and what every script shares: checkpoints, metrics, processes."""
