"""The same decisions in virtual time: the predictor answers in the GPU's place."""
