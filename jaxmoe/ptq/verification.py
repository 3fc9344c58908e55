"""What the verification of a checkpoint found: what is wrong, and what the parameters of each role take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxmoe.models.manifest import Entry
from jaxmoe.weights.cells import hub_cells
from jaxmoe.weights.encodings import Plain
from jaxmoe.weights.load import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    check: str
    """files, values (of what is decoded, its scales too), scales, grid, share, sqnr or source."""
    where: str
    """Tensor or file."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """All parameters of a role and a scheme."""

    role: str
    scheme: str
    tensors: int
    """Those that hold them, which may hold others' parameters too."""
    nbytes: int
    """On disk: values, scales and what else belongs to them; of a tensor of several parameters, these ones' part."""
    least_sqnr_db: float | None
    """Of its worst tensor; None: not quantised, not compared, or no error at all."""
    mean_sqnr_db: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found."""

    folder: str
    method: str
    """What the format calls itself."""
    source: str | None
    sqnr_of: Literal["source", "report"] | None
    """What SQNR is measured against; 'report': weights were changed before they were rounded, so that the source is
    no measure, and the figures are those that the quantiser measured and wrote down."""
    rows: tuple[RoleRow, ...]
    tensors: int
    nbytes: int
    quantised_share: float
    """Bytes of quantised parameters among those of all tensors."""
    problems: tuple[Problem, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def role_rows(files: ModelFiles, ratios: Mapping[str, float | None]) -> tuple[RoleRow, ...]:
    """A row for each role and scheme, in order.

    Args:
        files: the checkpoint.
        ratios: label of a cell -> its signal-to-noise ratio in dB, of those that were compared.
    """
    by_role: dict[tuple[str, str], list[Entry]] = {}
    for entry in files.manifest.entries:
        by_role.setdefault((entry.role, _stored_as(files, entry)), []).append(entry)
    return tuple(_row(files, role, scheme, entries, ratios) for (role, scheme), entries in sorted(by_role.items()))


def _stored_as(files: ModelFiles, entry: Entry) -> str:
    """The scheme, or how a tensor that is decoded is stored; 'float' if all of it is."""
    scheme = files.schemes.get(entry.path)
    if scheme is not None:
        return scheme.name
    encodings = {files.source.stored[name].encoding for _, name in entry.tensors()}
    return ", ".join(sorted("float" if isinstance(e, Plain) else e.label() for e in encodings))


def _row(
    files: ModelFiles, role: str, scheme: str, entries: list[Entry], ratios: Mapping[str, float | None]
) -> RoleRow:
    labels = [cell.label for entry in entries for cell in hub_cells(entry)]
    found = [ratio for label in labels if (ratio := ratios.get(label)) is not None]
    names = {name for entry in entries for _, name in entry.tensors()}
    return RoleRow(
        role=role,
        scheme=scheme,
        tensors=len(names),
        nbytes=sum(_stored_bytes(files, entry) for entry in entries),
        least_sqnr_db=min(found) if found else None,
        mean_sqnr_db=sum(found) / len(found) if found else None,
    )


def _stored_bytes(files: ModelFiles, entry: Entry) -> int:
    """Bytes of a parameter's tensors; of those that hold others too, its part."""
    stored = {name: files.source.stored[name] for _, name in entry.tensors()}
    parts = (part for name, each in stored.items() for part in each.encoding.parts(name, each.shape))
    return sum(files.checkpoint.tensors[part.name].nbytes for part in parts) // entry.view.parts
