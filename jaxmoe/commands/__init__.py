"""One module a subcommand: `add_arguments(parser)` and `run(options) -> exit code`. JAX is imported inside `run`."""
