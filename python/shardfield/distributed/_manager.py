"""DistributedManager: rank, device, named groups and meshes of this process."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfield._core import core
from shardfield._faults import tell_uncaught
from shardfield._mesh import _whole_group
from shardfield.distributed._config import ProcessGroupConfig, ProcessGroupNode

WORLD = "world"
GLOBAL_MESH = "global"
Partition = list[list[int]]


class UninitializedManagerError(RuntimeError):
    """DistributedManager() before initialize()."""


class UndefinedGroupError(LookupError):
    """A group or mesh name that nobody made."""


@dataclass
class _Entry:
    group: dist.ProcessGroup
    all: Partition  # the groups of this name over the whole job
    within: Partition  # the groups that these cut into blocks; empty for the world


@dataclass
class _State:
    launcher: str
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    owns_world: bool
    groups: dict[str, _Entry] = field(default_factory=dict)
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False


def _device_for(local_rank: int) -> torch.device:
    """The accelerator of a local rank, modulo those visible; the CPU on a host without any."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = core.device_index(local_rank, visible)
    return torch.device("cuda", index) if index >= 0 else torch.device("cpu")


def _default_backend(device: torch.device) -> str:
    if device.type == "cuda" and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def _agent_store(
    addr: str, port: int, world_size: int, timeout: datetime.timedelta | None
) -> dist.Store:
    """The store of torchrun's agent. It outlives a restart, and with it the dead ranks' addresses: every attempt
    has its own keys.
    """
    limit = timeout or datetime.timedelta(seconds=300)
    store = dist.TCPStore(addr, port, world_size, False, limit)
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _loopback_store(
    rank: int, world_size: int, port: int, timeout: datetime.timedelta | None
) -> dist.Store:
    """A store that other hosts cannot reach: torch's own listens on every address of this host."""
    limit = timeout or datetime.timedelta(seconds=300)
    if rank != 0:
        return dist.TCPStore("127.0.0.1", port, world_size, False, limit)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise RuntimeError(
            f"DistributedManager: rank 0 cannot listen on 127.0.0.1:{port} ({error.strerror}); pass another "
            "port, or set MASTER_PORT"
        ) from error
    listener.listen(1024)
    return dist.TCPStore(
        "127.0.0.1", port, world_size, True, limit, master_listen_fd=listener.detach()
    )


class DistributedManager:
    """Where this process stands in the job; one per process.

    `DistributedManager.initialize()` once, then `DistributedManager()` anywhere gives it.

    Example:
        >>> DistributedManager.initialize()
        >>> dm = DistributedManager()
        >>> mesh = dm.initialize_mesh((-1, 2), ("data", "domain"))
        >>> dm.rank, dm.device, dm.group_size("domain")
        (0, device(type='cpu'), 2)
    """

    _state: _State | None = None
    _instance: DistributedManager | None = None
    _exit_hook = False

    def __new__(cls) -> DistributedManager:
        if cls._state is None:
            raise UninitializedManagerError(
                "DistributedManager: not initialized; call DistributedManager.initialize() first"
            )
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    # ------------------------------------------------------------------------------------- start

    @staticmethod
    def is_initialized() -> bool:
        """True between initialize() (or setup()) and cleanup()."""
        return DistributedManager._state is not None

    @staticmethod
    def get_available_backend() -> str:
        """The backend that initialize() takes: Gloo, beside NCCL where there is an accelerator."""
        return _default_backend(_device_for(0))

    @staticmethod
    def initialize(timeout: datetime.timedelta | None = None) -> None:
        """Joins the job that a launcher started, or becomes one process. Collective over the job.

        A process group that exists already is taken as it is. Else the launcher is the one that
        SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD names (ENV, SLURM, OPENMPI, MPICH, SINGLE), or
        the first whose variables are set: torchrun's RANK and WORLD_SIZE, SLURM, Open MPI, MPICH.

        Args:
            timeout: of the collectives; torch's default when None.

        Raises:
            RuntimeError: variables that are incomplete, wrong, or of two launchers that disagree,
                with those that were found.
        """
        DistributedManager._start("", timeout)

    @staticmethod
    def initialize_env(timeout: datetime.timedelta | None = None) -> None:
        """initialize() from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
        DistributedManager._start("ENV", timeout)

    @staticmethod
    def initialize_slurm(port: int | str | None = None) -> None:
        """initialize() from SLURM's variables. MASTER_PORT wins over `port`."""
        DistributedManager._start("SLURM", None, None, port)

    @staticmethod
    def initialize_open_mpi(addr: str | None = None, port: int | str | None = None) -> None:
        """initialize() from Open MPI's variables. MASTER_ADDR and MASTER_PORT win."""
        DistributedManager._start("OPENMPI", None, addr, port)

    @staticmethod
    def setup(
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: int | str = 12355,
        backend: str | None = None,
        method: str = "EXPLICIT",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        """Joins a job by explicit values. Collective over the job.

        Args:
            rank: this process's number in the job.
            world_size: processes in the job.
            local_rank: number on this host; `rank` when None.
            addr: host of rank 0.
            port: port of rank 0's store.
            backend: torch.distributed backend; None chooses by device.
            method: what to report as the launcher.
            timeout: of the collectives; torch's default when None.

        Raises:
            ValueError: a rank outside [0, world_size).
        """
        if not 0 <= rank < world_size:
            raise ValueError(
                f"DistributedManager: expected a rank in [0, {world_size}), got {rank}"
            )
        if DistributedManager._refuse_twice():
            return
        local = rank if local_rank is None else local_rank
        device = _device_for(local)
        owns = not dist.is_initialized()
        if owns:
            DistributedManager._join(rank, world_size, addr, port, backend, device, method, timeout)
        elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"DistributedManager: torch.distributed is rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, expected rank {rank} of {world_size}; destroy that "
                "group or call initialize() without values"
            )
        DistributedManager._take(method, local, device, owns)

    @staticmethod
    def _start(
        method: str,
        timeout: datetime.timedelta | None,
        addr: str | None = None,
        port: int | str | None = None,
    ) -> None:
        if DistributedManager._refuse_twice():
            return
        variables = core.launch_variables()
        if dist.is_initialized():
            text = variables.get("LOCAL_RANK") or str(dist.get_rank())
            if not text.isdecimal():
                raise RuntimeError(
                    f"DistributedManager: expected a whole number in LOCAL_RANK, got '{text}'; unset "
                    "it or start with the launcher"
                )
            local = int(text)
            DistributedManager._take("TORCH", local, _device_for(local), False)
            return
        if addr is not None:
            variables.setdefault("MASTER_ADDR", addr)
        if port is not None:
            variables.setdefault("MASTER_PORT", str(port))
        name, rank, size, local, host, number = core.read_launch_environment(variables, method)
        DistributedManager.setup(
            rank, size, local, host or "localhost", number, None, name, timeout
        )

    @staticmethod
    def _refuse_twice() -> bool:
        if DistributedManager._state is None:
            return False
        warnings.warn(
            "DistributedManager: already initialized; call cleanup() first to start anew",
            stacklevel=4,
        )
        return True

    @staticmethod
    def _join(
        rank: int,
        world_size: int,
        addr: str,
        port: int | str,
        backend: str | None,
        device: torch.device,
        method: str,
        timeout: datetime.timedelta | None,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = backend or _default_backend(device)
        options: dict[str, Any] = {"timeout": timeout} if timeout else {}
        if device.type == "cuda" and "nccl" in backend:
            options["device_id"] = device
        if world_size == 1 and method in ("SINGLE", "EXPLICIT"):
            # No launcher, no port: groups, meshes and collectives work all the same.
            options.update(store=dist.HashStore(), rank=0, world_size=1)
        elif method == "ENV" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _agent_store(addr, int(port), world_size, timeout)
            options.update(store=store, rank=rank, world_size=world_size)
        elif _is_loopback(addr):
            store = _loopback_store(rank, world_size, int(port), timeout)
            options.update(store=store, rank=rank, world_size=world_size)
        elif method == "ENV":
            options.update(init_method="env://", rank=rank, world_size=world_size)
        else:
            options.update(init_method=f"tcp://{addr}:{port}", rank=rank, world_size=world_size)
        dist.init_process_group(backend, **options)

    @staticmethod
    def _take(launcher: str, local_rank: int, device: torch.device, owns_world: bool) -> None:
        size = dist.get_world_size()
        state = _State(launcher, dist.get_rank(), size, local_rank, device, owns_world)
        world = dist.distributed_c10d._get_default_group()
        state.groups[WORLD] = _Entry(world, [list(range(size))], [])
        DistributedManager._state = state
        tell_uncaught()
        if not DistributedManager._exit_hook:
            DistributedManager._exit_hook = True
            atexit.register(DistributedManager._at_exit)

    @staticmethod
    def _at_exit() -> None:
        # Whatever ends the process is what the user must see, not a group that fails to close.
        with contextlib.suppress(Exception):
            DistributedManager.cleanup()

    @staticmethod
    def cleanup(barrier: bool = False) -> None:
        """Forgets groups and meshes, and destroys the process group that initialize() made. Local,
        or collective over the job with `barrier`. Without effect when not initialized.
        """
        state = DistributedManager._state
        if state is None:
            return
        DistributedManager._state = None
        DistributedManager._instance = None
        if not dist.is_initialized():
            return
        if barrier:
            dist.barrier()
        if state.owns_world:
            dist.destroy_process_group()

    # --------------------------------------------------------------------------------- who am I

    @property
    def _own(self) -> _State:
        state = DistributedManager._state
        if state is None:
            raise UninitializedManagerError(
                "DistributedManager: cleaned up; call DistributedManager.initialize() first"
            )
        return state

    @property
    def launcher(self) -> str:
        """ENV, SLURM, OPENMPI, MPICH, SINGLE, EXPLICIT, or TORCH for a group taken over."""
        return self._own.launcher

    @property
    def rank(self) -> int:
        """This process's number in the job."""
        return self._own.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        return self._own.local_rank

    @property
    def world_size(self) -> int:
        """Processes in the job."""
        return self._own.world_size

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._own.device

    @property
    def distributed(self) -> bool:
        """True when the job has several processes."""
        return self._own.world_size > 1

    @property
    def cuda(self) -> bool:
        """True when the device is an accelerator of CUDA."""
        return self._own.device.type == "cuda"

    @property
    def broadcast_buffers(self) -> bool:
        """What to pass to DistributedDataParallel; False unless set."""
        return self._own.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._own.broadcast_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        """What to pass to DistributedDataParallel; False unless set."""
        return self._own.find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        self._own.find_unused_parameters = value

    # ----------------------------------------------------------------------------------- groups

    @property
    def group_names(self) -> list[str]:
        """Names of all groups; the first is "world"."""
        return list(self._own.groups)

    def group(self, name: str | None = None) -> dist.ProcessGroup:
        """This rank's group of a name; all ranks for None.

        Raises:
            UndefinedGroupError: an unknown name, with the known ones.
        """
        return self._entry(name).group

    def group_size(self, name: str | None = None) -> int:
        """Ranks in this rank's group of a name."""
        return self.group(name).size()

    def group_rank(self, name: str | None = None) -> int:
        """This rank's number in its group of a name."""
        return self.group(name).rank()

    def group_name(self, group: dist.ProcessGroup | None = None) -> str:
        """The name of a group object.

        Raises:
            UndefinedGroupError: a group the manager did not make.
        """
        for name, entry in self._own.groups.items():
            if entry.group is group or (group is None and name == WORLD):
                return name
        raise UndefinedGroupError(
            f"DistributedManager: no name for {group}; known: {self.group_names}"
        )

    def _entry(self, name: str | None) -> _Entry:
        entry = self._own.groups.get(WORLD if name is None else name)
        if entry is None:
            raise UndefinedGroupError(
                f"DistributedManager: no group '{name}'; known are {self.group_names}"
            )
        return entry

    def _check_new(self, names: Sequence[str]) -> None:
        """Raises before the first group is made: what was made half could not be made again."""
        for name in names:
            if name in self._own.groups:
                raise ValueError(
                    f"DistributedManager: the group '{name}' exists already; choose another name"
                )

    def _add(self, name: str, groups: Partition, within: Partition, verbose: bool = False) -> None:
        self._check_new([name])
        mine = None
        for ranks in groups:  # every rank makes every group, in one order: torch asks for it
            made = dist.new_group(ranks)
            if self.rank in ranks:
                mine = made
        self._own.groups[name] = _Entry(mine, groups, within)
        if verbose and self.rank == 0:
            print(f"DistributedManager: group '{name}': {groups}")

    @staticmethod
    def create_process_subgroup(
        name: str, size: int, group_name: str | None = None, verbose: bool = False
    ) -> None:
        """Cuts a group into blocks of `size` consecutive ranks. Collective over the job.

        Args:
            name: of the new groups.
            size: ranks per block; must divide the group.
            group_name: the group to cut; all ranks when None.
            verbose: print the groups on rank 0.

        Raises:
            ValueError: the name exists. RuntimeError: a size that does not divide.
        """
        dm = DistributedManager()
        within = dm._entry(group_name).all
        dm._add(name, core.consecutive_groups(within, size, name), within, verbose)

    @staticmethod
    def create_orthogonal_process_group(
        orthogonal_group_name: str, group_name: str, verbose: bool = False
    ) -> None:
        """The groups across the blocks `group_name`: the i-th ranks of all blocks. Collective over
        the job.

        Raises:
            ValueError: the name exists, or `group_name` is the world.
        """
        dm = DistributedManager()
        blocks = dm._entry(group_name)
        if not blocks.within:
            raise ValueError(
                f"DistributedManager: nothing is orthogonal to all ranks ('{group_name}')"
            )
        crossing = core.orthogonal_groups(blocks.within, blocks.all)
        dm._add(orthogonal_group_name, crossing, blocks.within, verbose)

    @staticmethod
    def create_group_from_node(
        node: ProcessGroupNode, parent: str = WORLD, verbose: bool = False
    ) -> str:
        """The group of one node inside `parent`, and the one orthogonal to it. Collective over the
        job.

        Returns:
            The orthogonal group's name.
        """
        if node.size is None:
            raise ValueError(f"DistributedManager: '{node.name}' has no size; set it first")
        orthogonal = f"__orthogonal_to_{node.name}"
        DistributedManager()._check_new([node.name, orthogonal])
        DistributedManager.create_process_subgroup(node.name, node.size, parent, verbose)
        DistributedManager.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @staticmethod
    def create_groups_from_config(
        config: ProcessGroupConfig, verbose: bool = False, innermost: str = "first"
    ) -> None:
        """All groups of a tree in one call. Collective over the job.

        Children of one parent are orthogonal to each other. Of world > (a, b) with sizes 2 and 2,
        a is {0, 1}, {2, 3} and b is {0, 2}, {1, 3}.

        Args:
            config: the tree; sizes left out are inferred.
            verbose: print the groups on rank 0.
            innermost: which child gets consecutive ranks, "first" or "last" (as in a DeviceMesh).

        Raises:
            RuntimeError: sizes that do not multiply out to the job's ranks, naming the nodes.
        """
        if innermost not in ("first", "last"):
            raise ValueError(f"innermost: expected 'first' or 'last', got '{innermost}'")
        dm = DistributedManager()
        plan = config.plan(dm.world_size, innermost == "first")
        dm._check_new([name for name, _, _ in plan])
        for name, groups, within in plan:
            dm._add(name, groups, within, verbose)

    # ----------------------------------------------------------------------------------- meshes

    @property
    def global_mesh(self) -> DeviceMesh | None:
        """The mesh that initialize_mesh made first; None before."""
        return self._own.meshes.get(GLOBAL_MESH)

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Axis names and sizes of the global mesh."""
        mesh = self.global_mesh
        names = (mesh.mesh_dim_names or ()) if mesh else ()
        return {n: mesh.size(i) for i, n in enumerate(names)} if mesh else {}

    def mesh_names(self) -> list[str]:
        """Every name that mesh() takes: meshes, and axes of the global mesh."""
        return [*self._own.meshes, *self.mesh_dims]

    def mesh_sizes(self) -> list[int]:
        """Sizes of the global mesh's axes."""
        return list(self.mesh_dims.values())

    def mesh(self, name: str | None = None) -> DeviceMesh:
        """A mesh by name: the global one for None, an axis of it, or one made under that name.

        Raises:
            UndefinedGroupError: an unknown name, with the known ones.
        """
        found = self._own.meshes.get(GLOBAL_MESH if name is None else name)
        if found is not None:
            return found
        if name is not None and name in self.mesh_dims and self.global_mesh is not None:
            return self.global_mesh[name]
        raise UndefinedGroupError(
            f"DistributedManager: no mesh '{name}'; known are {self.mesh_names()}"
        )

    def initialize_mesh(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str],
        name: str = GLOBAL_MESH,
    ) -> DeviceMesh:
        """A named mesh over all ranks, row-major (the last axis consecutive). Collective over the job.

        The axes of the global mesh are groups too: `group("domain")`.

        Args:
            mesh_shape: ranks per axis; one may be -1.
            mesh_dim_names: one name per axis.
            name: under which mesh() finds it.

        Raises:
            RuntimeError: a shape that does not fit the number of ranks, or names that do not fit it.
        """
        shape, names = list(mesh_shape), list(mesh_dim_names)
        if not shape or len(shape) != len(names) or len(set(names)) != len(names):
            raise RuntimeError(
                f"initialize_mesh: expected one different name per axis, got {names} for {shape}"
            )
        if name in self._own.meshes:
            raise RuntimeError(
                f"initialize_mesh: the mesh '{name}' exists already; pass another name= for a second"
            )
        others = -prod(shape)
        if shape.count(-1) == 1 and others > 0 and self.world_size % others == 0:
            shape[shape.index(-1)] = self.world_size // others
        if min(shape) < 1 or prod(shape) != self.world_size:
            raise RuntimeError(
                f"initialize_mesh: expected a shape of {self.world_size} ranks (one axis may be -1), "
                f"got {list(mesh_shape)}"
            )
        if name == GLOBAL_MESH:
            self._check_new(names)
        made = init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=tuple(names))
        self._own.meshes[name] = made
        if name == GLOBAL_MESH:
            self._register_axes(made)
        return made

    def _register_axes(self, mesh: DeviceMesh) -> None:
        world = self._own.groups[WORLD].all
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            along = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
            self._own.groups[name] = _Entry(mesh.get_group(axis), along, world)

    def get_mesh_group(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """The group over all ranks of a mesh, row-major. Collective over the mesh at first use."""
        return _whole_group(mesh)

    def __repr__(self) -> str:
        state = DistributedManager._state
        if state is None:
            return "DistributedManager(not initialized)"
        return (
            f"DistributedManager(rank={state.rank}, world_size={state.world_size}, local_rank="
            f"{state.local_rank}, device={state.device}, launcher={state.launcher}, groups="
            f"{list(state.groups)})"
        )
