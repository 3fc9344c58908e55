"""Arithmetic of quantised arrays: schemes, integer grids and the QArray. No operators, no models, no files."""
