"""Conversations as files of other kinds: what is read from them, and what is written."""
