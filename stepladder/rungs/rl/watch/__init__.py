"""What watches a run of reinforcement learning from within."""
