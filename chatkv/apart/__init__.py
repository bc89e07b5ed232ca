"""Prefill and decode apart: KV that one process computes for another, as frames on a wire."""
