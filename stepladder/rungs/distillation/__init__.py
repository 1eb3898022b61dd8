"""Distillation from a teacher's probabilities."""
