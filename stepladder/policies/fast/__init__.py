"""Kernels for a CPU: attention over packed rows, layers that keep less for the backward pass."""
