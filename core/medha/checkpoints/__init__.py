"""Checkpoint folders, read without torch: configuration, families, files, fit into a layout."""
