"""The bodies of commands that train nothing."""
