"""What a run will take, before anything is loaded: parameters, memory by part, seconds a step."""
