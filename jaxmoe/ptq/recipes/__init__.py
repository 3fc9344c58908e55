"""Around recipes: name patterns, evidence, the library by quant type, msModelSlim's YAML, the dry-run table."""
