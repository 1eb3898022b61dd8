"""The bundled worlds."""
