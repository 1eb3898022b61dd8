"""The ladder: a folder for each rung, and what they share."""
