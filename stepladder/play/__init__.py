"""Playing episodes: the agent loop, who acts in it, and the event loop that it runs on."""
