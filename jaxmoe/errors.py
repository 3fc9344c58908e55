"""The error tree. Every message says what, the values, where, and what to do.

JaxMoeError
├── ConfigError        a config.json, a TOML file or a command line does not make sense
├── PlanError          a mesh or a sharding plan does not fit the model or the machine
│   └── MemoryPlanError    the plan needs more memory than there is
├── RecipeError        a quantisation recipe does not fit the model
├── WeightsError       a checkpoint is missing, damaged, incomplete or has tensors too many
├── UnsupportedError   a legal request that this version cannot do
├── RequestError       a prompt or its parameters are refused
└── EngineError        the running engine broke one of its own promises
"""


class JaxMoeError(Exception):
    """Base of all errors that a user is meant to read; the command line prints it as one line and exits with 2."""


class ConfigError(JaxMoeError):
    """A config.json, a TOML file or a command line does not make sense."""


class PlanError(JaxMoeError):
    """A mesh or a sharding plan does not fit the model or the machine."""


class MemoryPlanError(PlanError):
    """The plan needs more memory than there is."""


class RecipeError(JaxMoeError):
    """A quantisation recipe does not fit the model."""


class WeightsError(JaxMoeError):
    """A checkpoint is missing, damaged, incomplete or has tensors too many."""


class UnsupportedError(JaxMoeError):
    """A legal request that this version cannot do."""


class RequestError(JaxMoeError):
    """A prompt or its parameters are refused."""


class EngineError(JaxMoeError):
    """The running engine broke one of its own promises."""
