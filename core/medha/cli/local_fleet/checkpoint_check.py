"""Checks of resources and their checkpoints before a fleet starts, all faults at once.

Reads headers and samples of the weights only. Controllers and ranks check with the same functions.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence

from medha.adapters.transports import (
    LOOPBACK,
    STAGING_BYTES,
    Transports,
    rdma_ports,
    transports,
)
from medha.checkpoints.checkpoint_files import check_tokenizer, digest_of, held_tensors
from medha.checkpoints.decoder_config import DecoderConfig, read_config, read_generation_defaults
from medha.checkpoints.fit import misfits, read_adapters
from medha.checkpoints.tensor_names import check_tensors
from medha.cli.local_fleet.faults import Faults
from medha.cli.local_fleet.fleet_plan import replica_count, router_models
from medha.cli.local_fleet.preflight import check_gpus
from medha.config import AdapterFolder, WorkerConfig
from medha.errors import SpecError
from medha.rendering import Site, network_of, worker_config
from medha.spec import AdapterSpec, CheckpointSource, MedhaReplica


def check_resources(
    resources: Sequence[MedhaReplica], gpus: int, *, weights: bool = True
) -> dict[str, str]:
    """Check the resources on a machine with `gpus` GPUs; return each one's checkpoint folder.

    `weights` False: skip the weight files. Raises UserErrors if there are several faults; they name
    their resource if there are several resources.
    """
    faults = Faults()
    folders: dict[str, pathlib.Path] = {}
    for resource in resources:
        with faults.collect(resource.name if len(resources) > 1 else ""):
            folders[resource.name] = check_resource(resource, gpus, weights=weights)
    with faults.collect():
        router_models(resources)
    with faults.collect():
        replica_count(resources)
    faults.add(*_other_models(resources, folders, weights=weights))
    faults.raise_all()
    return {name: str(folder) for name, folder in folders.items()}


def check_resource(resource: MedhaReplica, gpus: int, *, weights: bool = True) -> pathlib.Path:
    """Check a resource's device, network, checkpoint and layout; return the checkpoint's folder.

    Raises UserErrors if there are several faults.
    """
    faults = Faults()
    with faults.collect():
        check_gpus(resource, gpus)
    with faults.collect():
        local_transports(resource)
    with faults.collect():
        folder = folder_of("spec.model.source", resource.spec.model.source)
        model = None
        with faults.collect():
            model = read_config(folder)
            faults.add(*_misfits(model, resource, gpus))
            for index, adapter in enumerate(resource.spec.adapters):
                with faults.collect():
                    _check_adapter(f"spec.adapters[{index}].source", adapter, model, resource)
        with faults.collect():
            read_generation_defaults(folder)
        with faults.collect():
            check_tokenizer(folder)
        with faults.collect():
            if weights:
                held = held_tensors(folder)
                if model is not None:
                    check_tensors(folder, held, model)
    faults.raise_all()
    return folder


def local_transports(resource: MedhaReplica) -> Transports:
    """Choose the transports of ranks on this machine, as they do. Raises SpecError, SetupError."""
    device = resource.spec.device.kind.lower()
    locked = resource.spec.engine.kv_bytes if device == "cpu" else STAGING_BYTES
    network = network_of(resource.spec.network)
    return transports(network, LOOPBACK, device, rdma_ports(locked))


def _check_adapter(
    path: str, adapter: AdapterSpec, model: DecoderConfig, resource: MedhaReplica
) -> None:
    """Raise UserError unless the model takes the adapter."""
    folder = AdapterFolder(name=adapter.name, folder=str(folder_of(path, adapter.source)))
    read_adapters(model, _config(resource, (folder,)))


def folder_of(path: str, of: CheckpointSource) -> pathlib.Path:
    """Return the folder of a source on this machine. Raises SpecError."""
    source = of.host_path
    if source is None:
        raise SpecError(
            path,
            "pvc, image or uri",
            "must be hostPath on this machine",
            "set hostPath: {path: …}",
        )
    folder = pathlib.Path(source.path)
    if not folder.is_dir():
        raise SpecError(
            f"{path}.hostPath.path",
            source.path,
            "must be a folder",
            "put the files there or correct the path",
        )
    return folder


def _misfits(model: DecoderConfig, resource: MedhaReplica, gpus: int) -> Iterator[SpecError]:
    """Yield the faults of the layout, on as many KVP groups as the machine can run."""
    config = _config(resource)
    topology = config.topology
    groups = topology.kvp_max
    if config.device == "cuda":
        groups = min(groups, gpus // topology.ranks_per_group)
    return misfits(model, config, max(groups, topology.kvp_min))


def _config(resource: MedhaReplica, adapters: tuple[AdapterFolder, ...] = ()) -> WorkerConfig:
    nowhere = Site(
        checkpoint="",
        adapters=adapters,
        routers=(),
        curve=None,
        rank_bind="",
        ops_port=0,
        run_dir="",
    )
    return worker_config(resource, resource.name, nowhere)


def _other_models(
    resources: Sequence[MedhaReplica], folders: Mapping[str, pathlib.Path], *, weights: bool
) -> Iterator[SpecError]:
    """Yield each resource whose checkpoint differs from that of an earlier one of the same name."""
    first: dict[str, pathlib.Path] = {}
    for resource in resources:
        folder, name = folders.get(resource.name), resource.spec.model.name
        if folder is None:
            continue
        known = first.setdefault(name, folder)
        if not known.samefile(folder) and _identity(known, weights) != _identity(folder, weights):
            yield SpecError(
                f"spec.model.name of {resource.name}",
                name,
                f"must name one model, and the checkpoints in {known} and {folder} differ",
                "serve one of them under another name",
            )


def _identity(folder: pathlib.Path, weights: bool) -> str | DecoderConfig:
    """Return a value that differs between checkpoints."""
    return digest_of(folder) if weights else read_config(folder)
