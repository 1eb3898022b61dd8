"""Environments: what an agent acts in. No torch, no tokens: messages in, messages and rewards out."""
