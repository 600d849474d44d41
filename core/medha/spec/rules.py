"""Rules between fields of a MedhaReplica, checked after each field by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable

from medha.errors import SpecError
from medha.spec.quantities import seconds, to_bytes, to_number
from medha.spec.values import (
    MAX_PODS,
    RESOURCE_NAME,
    CheckpointSource,
    MedhaReplicaSpec,
    SloTargets,
    TtftTarget,
)


def check_rules(spec: MedhaReplicaSpec) -> None:
    """Raises SpecError for the first rule between fields that `spec` breaks."""
    _check_pods(spec)
    _check_source("spec.model.source", spec.model.source)
    _check_adapters(spec)
    _check_device(spec)
    _check_kvp(spec)
    _check_slo(spec)
    _check_budget(spec)
    _check_network(spec)
    _check_placement(spec)
    _check_autoscaling(spec)


def _check_pods(spec: MedhaReplicaSpec) -> None:
    pods = spec.parallelism.spp * spec.parallelism.kvp.min
    fields = [("spec.replicas", spec.replicas)]
    if spec.autoscaling is not None:
        fields.append(("spec.autoscaling.maxReplicas", spec.autoscaling.max_replicas))
    for path, replicas in fields:
        if replicas * pods > MAX_PODS:
            raise SpecError(
                path,
                replicas,
                f"must ask for at most {MAX_PODS} pods",
                f"use {MAX_PODS // pods} or less at {pods} pods each, and further resources of the "
                "same model.name",
            )


def _check_adapters(spec: MedhaReplicaSpec) -> None:
    seen: set[str] = set()
    for index, adapter in enumerate(spec.adapters):
        path = f"spec.adapters[{index}]"
        if adapter.name in seen:
            raise SpecError(
                f"{path}.name",
                adapter.name,
                "must differ from those of the other adapters",
                "give each adapter a name of its own",
            )
        seen.add(adapter.name)
        _check_source(f"{path}.source", adapter.source)


def _check_source(path: str, source: CheckpointSource) -> None:
    names = ("hostPath", "pvc", "image", "uri")
    given = [
        name
        for name, value in zip(
            names, (source.host_path, source.pvc, source.image, source.uri), strict=True
        )
        if value is not None
    ]
    if len(given) != 1:
        raise SpecError(
            path,
            " and ".join(given) or "empty",
            f"must have exactly one of {', '.join(names)}",
            f"keep {given[0]}" if given else "set hostPath: {path: …}",
        )


def _check_device(spec: MedhaReplicaSpec) -> None:
    device = spec.device
    if device.kind == "Cpu" and device.resource is not None:
        raise SpecError(
            "spec.device.resource",
            device.resource,
            "must be absent when spec.device.kind is Cpu",
            "remove it",
        )
    if device.kind == "Cpu" and spec.model.kv_cache_dtype == "fp8_e4m3":
        raise SpecError(
            "spec.model.kvCacheDtype",
            spec.model.kv_cache_dtype,
            "must be auto when spec.device.kind is Cpu",
            "use auto",
        )


def _check_kvp(spec: MedhaReplicaSpec) -> None:
    kvp = spec.parallelism.kvp
    if kvp.max < kvp.min:
        raise SpecError(
            "spec.parallelism.kvp.max",
            kvp.max,
            f"must be at least kvp.min, which is {kvp.min}",
            f"use {kvp.min} or more",
        )
    page = spec.engine.page_tokens
    if kvp.tokens_per_group is not None and kvp.tokens_per_group < page:
        raise SpecError(
            "spec.parallelism.kvp.tokensPerGroup",
            kvp.tokens_per_group,
            f"must hold at least one page of {page} tokens",
            f"use {page} or more",
        )
    holds = (kvp.tokens_per_group or spec.model.max_context_tokens) * kvp.max
    if spec.model.max_context_tokens > holds:
        raise SpecError(
            "spec.model.maxContextTokens",
            spec.model.max_context_tokens,
            f"must be at most kvp.max × tokensPerGroup, which is {holds}",
            f"use {holds} or raise one of the two",
        )
    if spec.engine.kv_pages is None and spec.engine.kv_bytes < 1 << 20:
        raise SpecError(
            "spec.engine.kvMemory",
            spec.engine.kv_memory,
            "must be at least 1Mi",
            f"use 1Mi or more (it is {to_bytes(spec.engine.kv_memory)} bytes)",
        )
    if spec.engine.kv_bytes > 1 << 50:
        raise SpecError(
            "spec.engine.kvMemory", spec.engine.kv_memory, "must be at most 1024Ti", "use 40Gi"
        )


def _check_slo(spec: MedhaReplicaSpec) -> None:
    default: SloTargets = spec.slo.default
    _check_ttft("spec.slo.default.ttft", default.ttft)
    _check_positive("spec.slo.default.tpot", default.tpot)
    seen = {"default"}
    for index, slo_class in enumerate(spec.slo.classes):
        path = f"spec.slo.classes[{index}]"
        if slo_class.name in seen:
            raise SpecError(
                f"{path}.name",
                slo_class.name,
                f"must differ from {', '.join(sorted(seen))}",
                "give each class a name of its own",
            )
        seen.add(slo_class.name)
        if slo_class.ttft is not None:
            _check_ttft(f"{path}.ttft", slo_class.ttft)
        if slo_class.tpot is not None:
            _check_positive(f"{path}.tpot", slo_class.tpot)
    reserved = sum(slo_class.reserved_percent for slo_class in spec.slo.classes)
    if reserved > 100:
        raise SpecError(
            "spec.slo.classes",
            f"reserving {reserved} percent in all",
            "must reserve at most 100 percent together",
            "lower their reservedPercent",
        )


def _check_ttft(path: str, ttft: TtftTarget) -> None:
    _check_positive(f"{path}.floor", ttft.floor)
    if to_number(ttft.multiplier) < 1.0:
        raise SpecError(
            f"{path}.multiplier",
            ttft.multiplier,
            "must be at least 1: no prefill is faster than on an idle replica",
            'use "1.5"',
        )


def _check_budget(spec: MedhaReplicaSpec) -> None:
    budget = spec.scheduling.batch_budget
    path = "spec.scheduling.batchBudget"
    fields = (("min", budget.min), ("max", budget.max), ("fixed", budget.fixed))
    for name, value in fields:
        _check_positive(f"{path}.{name}", value)
    if seconds(budget.min) > seconds(budget.max):
        raise SpecError(
            f"{path}.min",
            budget.min,
            f"must be at most max, which is {budget.max}",
            f"use {budget.max} or less",
        )
    _check_positive("spec.scheduling.growthTimeout", spec.scheduling.growth_timeout)
    _check_positive("spec.drainTimeout", spec.drain_timeout)


def _check_network(spec: MedhaReplicaSpec) -> None:
    if spec.network.transport == "Tcp" and spec.network.devices:
        raise SpecError(
            "spec.network.devices",
            ", ".join(spec.network.devices),
            "must be absent when spec.network.transport is Tcp",
            "remove them",
        )
    for name in spec.network.resources:
        if not re.search(RESOURCE_NAME, name):
            raise SpecError(
                "spec.network.resources",
                name,
                "must be extended resources with their domain",
                "write rdma/hca",
            )


def _check_placement(spec: MedhaReplicaSpec) -> None:
    placement = spec.placement
    for index, level in enumerate(placement.topology_levels):
        if level in placement.topology_levels[:index]:
            raise SpecError(
                "spec.placement.topologyLevels",
                level,
                "must differ from each other",
                "remove the second one",
            )
    if placement.pack_level is not None and placement.pack_level not in placement.topology_levels:
        raise SpecError(
            "spec.placement.packLevel",
            placement.pack_level,
            "must be one of spec.placement.topologyLevels",
            f"use one of {_listed(placement.topology_levels)}",
        )


def _check_autoscaling(spec: MedhaReplicaSpec) -> None:
    scaling = spec.autoscaling
    if scaling is not None and scaling.max_replicas < scaling.min_replicas:
        raise SpecError(
            "spec.autoscaling.maxReplicas",
            scaling.max_replicas,
            f"must be at least minReplicas, which is {scaling.min_replicas}",
            f"use {scaling.min_replicas} or more",
        )


def _check_positive(path: str, duration: str) -> None:
    if seconds(duration) <= 0:
        raise SpecError(path, duration, "must be longer than nothing", "use 1ms or more")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "the labels that you list there"
