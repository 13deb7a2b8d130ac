"""Build and check the process mesh; read this rank's place on it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Axis(NamedTuple):
    """One axis of a mesh as this rank sees it. `group` is a process group's name, "" for a size of 1."""

    size: int
    rank: int
    group: str


ALONE = Axis(1, 0, "")


def init_mesh(
    *,
    ring: int,
    ulysses: int,
    data: int = 1,
    order: tuple[str, ...] = ("data", "ring", "ulysses"),
    device_type: str | None = None,
) -> DeviceMesh:
    """A mesh with the axes "data", "ring" and "ulysses" over all ranks of the job.

    The last axis of `order` holds consecutive ranks: by default Ulysses groups stay inside a node and
    rings go across nodes. Starts torch.distributed from the environment (torchrun) if it has not
    been started. Every rank calls this. The groups of the axes get the timeout of the job's own group.

    Raises:
        ValueError: if the degrees do not multiply to the number of ranks, one is below 1, or `order` does not
            name the three axes.
    """
    degrees = {"data": data, "ring": ring, "ulysses": ulysses}
    text = " x ".join(f"{name}={size}" for name, size in degrees.items())
    if min(degrees.values()) < 1:
        raise ValueError(f"mesh of {text}: every degree is at least 1")
    if sorted(order) != sorted(degrees):
        raise ValueError(f"order={order} must name each of {tuple(degrees)} once")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device_type == "cpu" else None)
    world = dist.get_world_size()
    if math.prod(degrees.values()) != world:
        raise ValueError(f"mesh of {text} has {math.prod(degrees.values())} ranks, but the job has {world}")
    mesh = init_device_mesh(device_type, tuple(degrees[name] for name in order), mesh_dim_names=tuple(order))
    backend = distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    if options := getattr(backend, "options", None):  # PyTorch made the groups with its default: half an hour on gloo
        for group in mesh.get_all_groups():
            distributed_c10d._set_pg_timeout(options._timeout, group)
    return mesh


def axes(mesh: DeviceMesh | None) -> tuple[Axis, Axis]:
    """This rank's place on the ring and on the Ulysses axis; a mesh of None is one process.

    Raises:
        ValueError: if the mesh lacks one of the two axes.
    """
    if mesh is None:
        return ALONE, ALONE
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: make it with usp.init_mesh, or give None for one process")
    names = mesh.mesh_dim_names or ()
    if missing := [name for name in ("ring", "ulysses") if name not in names]:
        raise ValueError(f"the mesh has the axes {names} and lacks {missing}; give it one of size 1 if it is not used")
    return _axis(mesh, "ring"), _axis(mesh, "ulysses")


def data_axis(mesh: DeviceMesh | None) -> Axis:
    """This rank's place on the "data" axis, if the mesh has one."""
    return _axis(mesh, "data") if mesh is not None and "data" in (mesh.mesh_dim_names or ()) else ALONE


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    dim = (mesh.mesh_dim_names or ()).index(name)  # slicing mesh[name] would take a millisecond
    size = mesh.size(dim)
    return ALONE if size == 1 else Axis(size, mesh.get_local_rank(dim), mesh.get_group(dim).group_name)
