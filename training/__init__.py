"""Fitting exit heads, the LayerSkip recipe and pretraining; run from a checkout.

The package `selfspec` never imports this one. Every script is thin: it reads a config
(`python -m training.fit_heads --config configs/fit_lens.yaml loop.steps=200`), makes a task and
hands it to the one loop.
"""
