"""Reward models of whole answers and of steps."""
