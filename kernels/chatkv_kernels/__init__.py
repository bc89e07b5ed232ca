"""The arithmetic of a turn: kernels, each beside a plain-torch reference of the same name."""
