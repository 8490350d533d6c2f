"""The device mesh and the one table of rules that maps logical axes to its axes."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cplm_jax.config import Config, MeshConfig
from cplm_jax.errors import UserError, first_line

AXES = ("data", "fsdp", "tensor", "sequence")

# Logical axis of an array -> mesh axes it is split over. Nothing else names a mesh axis.
RULES: dict[str, tuple[str, ...]] = {
    # activations and batches
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "tokens": ("data", "fsdp", "sequence"),  # rows and positions as one axis
    # parameters
    "embed": ("fsdp",),
    # both
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocabulary": ("tensor",),
}

# Configuration field that sets the size of a sharded axis, for error messages.
_FIELD_OF_AXIS = {
    "embed": "model.width",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "mlp": "model.mlp_width",
    "vocabulary": "model.vocabulary_size",
}


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Returns the partition spec of an array with these logical axes; unlisted axes are not split."""
    entries = (RULES.get(axis) if axis is not None else None for axis in axes)
    return PartitionSpec(*(e[0] if e is not None and len(e) == 1 else e for e in entries))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins the sharding of an activation; does nothing where no mesh is in use (``jax.set_mesh``)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes))


def on_mesh(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Makes a function of one device's parts a function of whole arrays (``jax.shard_map``).

    Where no mesh is in use, or one of a single device, the function itself is called. Inside it,
    :func:`psum`, :func:`pmax`, :func:`sum_parts` and :func:`part_index` reach the other devices.

    Args:
      function: of arrays, or trees of them, as one device holds them.
      in_axes: for each argument its logical axes, a tuple, or a tree of tuples.
      out_axes: likewise for the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    in_specs, out_specs = jax.tree.map(partition_spec, (in_axes, out_axes), is_leaf=_is_axes)
    # Replication is not tracked: functions with sums over the mesh bring their own gradients.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_axes(node: Any) -> bool:
    """Whether a node of a tree of logical axes is a leaf: a plain tuple of names."""
    return type(node) is tuple and all(n is None or isinstance(n, str) for n in node)


def _split_over(logical: str) -> tuple[str, ...]:
    """Returns the mesh axes that split a logical axis here; none outside :func:`on_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in RULES[logical] if a in mesh.manual_axes and mesh.shape[a] > 1)


def psum(x: jax.Array, logical: str) -> jax.Array:
    """Sums over the devices that split a logical axis; the identity outside :func:`on_mesh`."""
    axes = _split_over(logical)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, logical: str) -> jax.Array:
    """Largest over the devices that split a logical axis; the identity outside :func:`on_mesh`."""
    axes = _split_over(logical)
    return jax.lax.pmax(x, axes) if axes else x


def parts(logical: str) -> int:
    """Returns into how many parts a logical axis is split; 1 outside :func:`on_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in _split_over(logical))


def ways(logical: str) -> int:
    """Returns into how many parts the mesh in use splits a logical axis, inside :func:`on_mesh` or not."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else _ways(logical, mesh)


def part_index(logical: str) -> jax.Array:
    """Returns which part of a logical axis this device holds; 0 outside :func:`on_mesh`."""
    axes = _split_over(logical)
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def sum_parts(x: jax.Array, over: Sequence[str], axes: Sequence[str | None]) -> jax.Array:
    """Sums over the devices that split the logical axes ``over`` and keeps this device's part.

    Args:
      x: what this device adds; its dimensions named in ``axes`` are whole where ``over`` splits them.
      over: logical axes to sum over.
      axes: logical axes of the result; a dimension whose mesh axis is summed over is scattered.
    """
    for mesh_axis in dict.fromkeys(a for logical in over for a in _split_over(logical)):
        kept = [i for i, axis in enumerate(axes) if axis is not None and mesh_axis in RULES[axis]]
        if kept:
            x = jax.lax.psum_scatter(x, mesh_axis, scatter_dimension=kept[0], tiled=True)
        else:
            x = jax.lax.psum(x, mesh_axis)
    return x


def named_sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Returns the sharding of an array with these logical axes on ``mesh``."""
    return NamedSharding(mesh, partition_spec(axes))


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Returns the axis sizes for ``devices`` devices, with -1 filled in.

    Raises:
      UserError: if the axes do not fit the devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    fixed = math.prod(s for s in sizes if s != -1)
    shown = ", ".join(f"mesh.{axis} = {size}" for axis, size in zip(AXES, sizes, strict=True))
    if -1 in sizes:
        if devices % fixed or devices < fixed:
            raise UserError(
                f"{shown}: the fixed axes take {fixed} devices, which does not divide the {devices} present"
            )
        return tuple(devices // fixed if s == -1 else s for s in sizes)
    if fixed > devices:
        raise UserError(
            f"{shown}: the mesh needs {fixed} devices and {devices} are present; make an axis smaller "
            "or set one to -1 (all remaining devices)"
        )
    return tuple(sizes)


def devices() -> list[jax.Device]:
    """Returns the devices present, of all processes.

    Raises:
      UserError: if JAX_PLATFORMS names a backend that is not there.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:  # the latter where no backend of the list is installed
        reason = first_line(e) if str(e) else "none is installed"
        raise UserError(
            f"no usable device for JAX_PLATFORMS = {os.environ.get('JAX_PLATFORMS')!r}: {reason}; install "
            "JAX for that device, or unset JAX_PLATFORMS to use what is there"
        ) from e


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh of the configuration on the devices present.

    Raises:
      UserError: if the axes do not fit the devices, or leave devices of other processes unused.
    """
    present = devices()
    shape = mesh_shape(config, len(present))
    size = math.prod(shape)
    if size != len(present) and jax.process_count() > 1:
        raise UserError(
            f"the mesh uses {size} of {len(present)} devices, but with several processes it must use all"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=present[:size])


def check_divisible(logical_axes: Any, shapes: Any, mesh: Mesh) -> None:
    """Checks that the mesh splits every parameter evenly.

    Args:
      logical_axes: nested dict of tuples of logical axis names.
      shapes: nested dict, the same keys, of arrays or ``jax.ShapeDtypeStruct``.
      mesh: the mesh.

    Raises:
      UserError: naming the configuration field and the mesh axis.
    """
    if isinstance(logical_axes, Mapping):
        for key in logical_axes:
            check_divisible(logical_axes[key], shapes[key], mesh)
        return
    for axis, size in zip(logical_axes, shapes.shape, strict=True):
        if axis in RULES and size % _ways(axis, mesh):
            mesh_axis = RULES[axis][0]
            raise UserError(
                f"{_FIELD_OF_AXIS[axis]} = {size} is not a multiple of mesh.{mesh_axis} = "
                f"{mesh.shape[mesh_axis]}; change one of them"
            )


def check_batches_divisible(config: Config, mesh: Mesh, training: bool = True) -> None:
    """Checks that the mesh splits rows and lengths of batches evenly, those of training if there is any.

    Raises:
      UserError: naming the configuration field and the mesh axes.
    """
    length, pieces = config.data.sequence_length, _ways("length", mesh)
    if length % pieces:
        raise UserError(
            f"data.sequence_length = {length} is not a multiple of mesh.sequence = {pieces}, over which the "
            "context is split; change one of them"
        )
    rows = {"evaluation.batch_size": config.evaluation.batch_size}
    if training:
        part = config.train.batch_size // config.train.accumulation
        rows = {"train.batch_size / train.accumulation": part, **rows}
    for name, count in rows.items():
        if count % _ways("batch", mesh):
            raise UserError(
                f"{name} = {count} is not a multiple of mesh.data x mesh.fsdp = {_ways('batch', mesh)}, over "
                "which the rows of a batch are split; change one of them"
            )


def _ways(axis: str, mesh: Any) -> int:
    return math.prod(mesh.shape[a] for a in RULES[axis])


def shardings(logical_axes: Any, mesh: Mesh) -> Any:
    """Returns the same nested dict with a ``NamedSharding`` for every tuple of logical axes."""
    return jax.tree.map(
        lambda axes: named_sharding(mesh, *axes), logical_axes, is_leaf=lambda x: isinstance(x, tuple)
    )
