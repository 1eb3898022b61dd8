"""L1: a run folder turned into something a person reads. No torch, nothing of the trainer."""
