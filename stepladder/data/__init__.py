"""Text to tokens and back: chat rendering, datasets, samples, batching. No torch."""
