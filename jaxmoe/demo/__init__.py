"""The demo model: SmolLM2-135M-Instruct with its feed-forward layers carved into shared and routed experts."""
