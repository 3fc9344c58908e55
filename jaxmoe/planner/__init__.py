"""Memory before it is allocated: the ledger of a model on a plan. Reads manifests, never files."""
