"""Pure functions on tensors: the mathematics of every rung."""
