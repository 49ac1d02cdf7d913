"""What computes layers in passes: prepacked weights, lean forms, compiled layers, CUDA graphs."""
