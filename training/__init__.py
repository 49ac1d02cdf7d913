"""Fitting exit heads, the LayerSkip recipe and pretraining.

In a checkout this is the package `training`, in a wheel `selfspec.training`, so its modules import
one another by relative names. Every script is thin: it reads a config
(`python -m training.fit_heads --config configs/fit_lens.yaml loop.steps=200`), makes a task and
hands it to the one loop.
"""
