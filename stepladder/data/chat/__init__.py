"""Conversations as token ids and back: templates, tool formats, what content may never become."""
