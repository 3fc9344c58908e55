"""One logger: short lines on standard error, a level per line."""

import logging

logger = logging.getLogger("jaxmoe")


def configure(*, verbose: bool = False) -> None:
    """Sends the project's log lines to standard error; called once by the command line."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False
