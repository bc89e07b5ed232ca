"""Checkpoints whose weights were quantised by others: GPTQ, AWQ, FP8 and compressed-tensors."""
