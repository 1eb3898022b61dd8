"""The training loops: each reads top to bottom."""
