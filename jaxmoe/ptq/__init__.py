"""Post-training quantisation: recipes, the stream over layers, and the report."""
