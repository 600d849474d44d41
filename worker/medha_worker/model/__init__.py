"""Decoder models: families, configuration, layers and arithmetic, named as in the papers."""
