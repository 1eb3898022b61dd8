"""The folder that a run fills: its files, its records, what a person sees while it works."""
