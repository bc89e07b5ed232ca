"""Conversations, token-exact: what a turn is and how it is committed."""
