"""Shapes and types of everything under stepladder.objectives are checked on every call the tests make."""

from jaxtyping import install_import_hook

install_import_hook("stepladder.objectives", "beartype.beartype")
