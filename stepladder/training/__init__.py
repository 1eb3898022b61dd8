"""L4: the loops that train, and the folder a run fills."""
