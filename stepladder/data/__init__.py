"""Text to tokens and back: conversations, tool calls, masks, data files. No torch here."""
