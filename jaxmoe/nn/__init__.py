"""Model parts: they declare parameters with axis names and hold no mutable state."""
