"""Attention over paged KV: one interface, kernels behind it, and the merge of partial states."""
