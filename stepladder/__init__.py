"""stepladder: take a language model up the whole training ladder."""

__version__ = "0.1.0"
