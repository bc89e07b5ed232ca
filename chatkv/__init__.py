"""chatkv: a multi-turn chat runtime whose conversations, KV cache included, outlive the process."""

__version__ = "0.1.0"
