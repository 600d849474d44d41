"""KV pages as tensors, and how they move between ranks."""
