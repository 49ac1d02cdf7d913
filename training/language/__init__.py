"""Training whole models: the language task, LayerSkip, the vocabulary."""
