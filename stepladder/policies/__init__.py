"""The model being trained: loading, scoring tokens, optimiser state, checkpoints."""
