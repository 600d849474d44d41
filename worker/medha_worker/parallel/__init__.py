"""Process groups, tensor and pipeline parallelism, and exchange of partial attention between
groups.
"""
