"""The recipe: one TOML file, closed and typed; a section for each part of a run. Imports no torch."""
