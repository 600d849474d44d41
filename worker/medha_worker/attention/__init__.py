"""Attention over paged KV: the kernel interface, its kernels, and the merge of partial states."""
