"""Sensitivity: how hard each linear layer's input is to quantise, what each scheme costs, and the best use of bytes."""
