"""Reads metrics and trajectories only: signals and alarms."""
