"""Rotation of a checkpoint (QuaRot): the same model with its outliers spread over many channels."""
