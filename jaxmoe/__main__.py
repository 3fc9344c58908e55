"""`python -m jaxmoe` is the `jaxmoe` command."""

from jaxmoe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
