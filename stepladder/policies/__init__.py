"""L2: the model being trained: loading it, tiny ones from scratch, checkpoints and exports."""
