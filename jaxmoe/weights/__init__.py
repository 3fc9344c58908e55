"""Checkpoints on disk: checked before a tensor is read, read in slices, written in a stream."""
