"""Model families, one file each, readable beside the paper."""
