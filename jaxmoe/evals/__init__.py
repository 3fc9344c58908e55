"""Quality gates: perplexity, divergence and routing of a model against its float baseline, through the serving path."""
