"""From token ids to token ids: the block pool, prefill, decode and sampling."""
