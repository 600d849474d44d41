"""Outputs with a structure: grammars that clients ask for, and calls of tools."""
