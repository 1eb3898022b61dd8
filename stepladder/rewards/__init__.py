"""Rewards: functions and models that score finished episodes."""
