"""Parameters in the engine: weights, shards, gradients and buffers."""
