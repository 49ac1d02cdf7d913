"""What computes the layers in passes: prepacked weights, compiled layers, CUDA graphs."""
