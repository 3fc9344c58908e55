"""mesh.make: shape, order and kind of the mesh, and the refusal of more devices than there are."""

import jax
import pytest
from jax.sharding import AxisType

from jaxmoe.errors import PlanError
from jaxmoe.parallel import mesh


@pytest.mark.parametrize("axes", [{"data": 1, "expert": 8}, {"data": 2, "expert": 4}, {"expert": 3}, {"data": 1}])
def test_mesh_has_auto_axes_in_order_over_the_first_devices(axes: dict[str, int]) -> None:
    grid = mesh.make(axes)
    assert dict(grid.shape) == axes and grid.axis_names == tuple(axes)
    assert grid.axis_types == (AxisType.Auto,) * len(axes)
    assert grid.devices.ravel().tolist() == jax.devices()[: grid.size]


def test_mesh_over_given_devices() -> None:
    devices = jax.devices()[4:]
    assert mesh.make({"data": 2, "expert": 2}, devices).devices.ravel().tolist() == devices


def test_too_many_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError) as error:
        mesh.make({"data": 3, "expert": 4})
    assert str(error.value) == (
        "the mesh {'data': 3, 'expert': 4} needs 12 devices, this process has 8 (cpu); ask for fewer with --devices"
    )
