"""Early exits inside serving engines, with the target's own weights and KV cache."""
