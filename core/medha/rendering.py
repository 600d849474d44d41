"""Rendering of a MedhaReplica into the WorkerConfig of its processes.

Pure. The resource defines what is computed, `Site` where: addresses, folders, keys. `medha up` and
the operator each build a Site; everything else is the same.
"""

from __future__ import annotations

import msgspec

from medha import spec as resource
from medha.config import AHEAD_S, AdapterFolder, Curve, Network, Scheduling, WorkerConfig
from medha.spec import MedhaReplica, seconds

POLICIES = {
    "LARS": "lars",
    "LARSPaper": "lars-paper",
    "LARSPaperNoSharing": "lars-paper-no-sharing",
    "LRS": "lrs",
    "EDF": "edf",
    "SRPF": "srpf",
    "FCFS": "fcfs",
}


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and paths of a replica's processes; see the same fields in WorkerConfig."""

    checkpoint: str
    adapters: tuple[AdapterFolder, ...] = ()
    routers: tuple[str, ...]
    curve: Curve | None
    rank_bind: str
    rank_curve: Curve | None = None
    store_bind: str = "127.0.0.1:0"
    interface: str = "lo"
    ops_host: str = "127.0.0.1"
    ops_port: int
    ops_token: str = ""
    run_dir: str
    decision_log: str = ""
    dummy_weights: bool = False
    profile: str = ""
    log_level: str = "info"


def worker_config(resource: MedhaReplica, name: str, site: Site) -> WorkerConfig:
    """Config of the processes of the replica `name`."""
    spec = resource.spec
    cuda = spec.device.kind == "Cuda"
    scheduling = scheduling_of(spec.scheduling, cuda)
    dtype = ("bfloat16" if cuda else "float32") if spec.model.dtype == "auto" else spec.model.dtype
    return WorkerConfig(
        replica=name,
        model=spec.model.name,
        checkpoint=site.checkpoint,
        adapters=site.adapters,
        max_context_tokens=spec.model.max_context_tokens,
        topology=spec.topology,
        device="cuda" if cuda else "cpu",
        dtype=dtype,
        kv_dtype=spec.model.kv_cache_dtype,
        page_tokens=spec.engine.page_tokens,
        kv_pages=spec.engine.kv_pages or 0,
        kv_bytes=spec.engine.kv_bytes,
        scheduling=scheduling.for_pipeline(spec.topology.spp, spec.classes),
        classes=spec.classes,
        routers=site.routers,
        curve=site.curve,
        rank_bind=site.rank_bind,
        rank_curve=site.rank_curve,
        store_bind=site.store_bind,
        interface=site.interface,
        network=network_of(spec.network),
        ops_host=site.ops_host,
        ops_port=site.ops_port,
        ops_token=site.ops_token,
        threads_per_rank=spec.engine.threads_per_rank,
        packed_weights=spec.engine.packed_weights == "Enabled",
        checked_transfers=spec.engine.checked_transfers == "Enabled",
        standby_ranks=spec.engine.standby_ranks == "Enabled",
        decision_log=site.decision_log,
        run_dir=site.run_dir,
        deterministic=spec.engine.arithmetic == "Deterministic",
        dummy_weights=site.dummy_weights,
        profile=site.profile,
        log_level=site.log_level,
    )


def network_of(spec: resource.NetworkSpec) -> Network:
    """Network settings from the resource, for ranks that share a machine."""
    return Network(
        transport=spec.transport.lower(),
        devices=spec.devices,
        gpu_direct=spec.gpu_direct == "Enabled",
    )


def scheduling_of(spec: resource.SchedulingSpec, cuda: bool) -> Scheduling:
    """Scheduler settings from the resource.

    `cuda`: a GPU computes in parallel with the host, which can decide the next batch early.
    """
    budget = spec.batch_budget
    ahead = cuda if spec.decide_ahead == "Auto" else spec.decide_ahead == "Enabled"
    return Scheduling(
        policy=POLICIES[spec.policy],
        normaliser=spec.normaliser.lower(),
        budget=budget.mode.lower(),
        fixed_s=seconds(budget.fixed),
        min_batch_s=seconds(budget.min),
        max_batch_s=seconds(budget.max),
        batch_tokens=budget.tokens,
        long_prefill_threshold_tokens=spec.long_prefill_threshold_tokens,
        long_tokens=spec.long_tokens,
        max_yield=spec.max_yield_percent / 100,
        relegated_share=spec.relegated_percent / 100,
        max_bucket_loss=spec.max_bucket_loss_percent / 100,
        commit=spec.promises == "Commit",
        growth_timeout_s=seconds(spec.growth_timeout),
        max_running=spec.max_running,
        prefix_cache=spec.prefix_cache == "Enabled",
        rebalance=spec.rebalance == "Enabled",
        release_cooldown_s=seconds(spec.release_cooldown),
        ahead_s=AHEAD_S if ahead else 0.0,
    )
