"""What a rung is handed: policy, engine, world and limits, built from a recipe."""
