"""Rows of users' files, in whatever format, as records. No tokens."""
