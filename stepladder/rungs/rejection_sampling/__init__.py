"""Rejection sampling: the policy learns from its own good episodes."""
