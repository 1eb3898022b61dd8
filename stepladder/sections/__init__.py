"""The sections of a recipe: closed pydantic models, one file for each kind of rung. Imports no torch."""
