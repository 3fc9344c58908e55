"""Output formats of quantised checkpoints: a closed table."""

from collections.abc import Mapping
from typing import Final

from jaxmoe.errors import ConfigError
from jaxmoe.ptq.export.ascend import AscendV1
from jaxmoe.ptq.export.compressed_tensors import CompressedTensors
from jaxmoe.ptq.export.native import Native
from jaxmoe.ptq.export.output import OutputFormat

FORMATS: Final[Mapping[str, OutputFormat]] = {
    output.name: output for output in (Native(), CompressedTensors(), AscendV1())
}
"""Name -> format, our own first."""


def output_format(name: str) -> OutputFormat:
    """The format of a name.

    Raises:
        ConfigError: no such format; all are listed.
    """
    if name not in FORMATS:
        raise ConfigError(f"no output format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
