"""Reconcilers and the loops that run them."""
