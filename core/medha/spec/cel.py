"""Rules of the CRD in CEL, by the path of the schema that holds them; "" is the spec itself.

`rules.py` has the same rules for documents that no API server has seen. A rule stands at the spec
where it needs several parts, or a part whose own default is {}: the server checks a default before
it fills in those of the fields below.
"""

from __future__ import annotations

from collections.abc import Mapping

from medha.spec.values import MAX_PODS, RESOURCE_NAME

Rule = Mapping[str, str]

_ONE_SOURCE: tuple[Rule, ...] = (
    {
        "rule": (
            "[has(self.hostPath), has(self.pvc), has(self.image), has(self.uri)] "
            ".exists_one(given, given)"
        ),
        "message": (
            "must have exactly one of hostPath, pvc, image, uri; keep one of them, or set"
            " hostPath: {path: …}"
        ),
    },
)

CEL: Mapping[str, tuple[Rule, ...]] = {
    "": (
        {
            "rule": "self.device.kind != 'Cpu' || self.model.kvCacheDtype != 'fp8_e4m3'",
            "fieldPath": ".model.kvCacheDtype",
            "message": "must be auto when spec.device.kind is Cpu; use auto",
        },
        {
            "rule": "self.parallelism.kvp.max >= self.parallelism.kvp.min",
            "fieldPath": ".parallelism.kvp.max",
            "message": "must be at least kvp.min; raise it or lower kvp.min",
            "messageExpression": (
                "'must be at least kvp.min, which is %d; use %d or more' "
                ".format([self.parallelism.kvp.min, self.parallelism.kvp.min])"
            ),
        },
        {
            "rule": (
                "!has(self.parallelism.kvp.tokensPerGroup) || "
                "self.parallelism.kvp.tokensPerGroup >= self.engine.pageTokens"
            ),
            "fieldPath": ".parallelism.kvp.tokensPerGroup",
            "message": "must hold at least one page; use engine.pageTokens or more",
            "messageExpression": (
                "'must hold at least one page of %d tokens; use %d or more' "
                ".format([self.engine.pageTokens, self.engine.pageTokens])"
            ),
        },
        {
            "rule": (
                "!has(self.parallelism.kvp.tokensPerGroup) || self.model.maxContextTokens <= "
                "self.parallelism.kvp.max * self.parallelism.kvp.tokensPerGroup"
            ),
            "fieldPath": ".model.maxContextTokens",
            "message": (
                "must be at most kvp.max × tokensPerGroup; lower it or raise one of the two"
            ),
            "messageExpression": (
                "'must be at most kvp.max × tokensPerGroup, which is %d; lower it or raise "
                "one of them' .format([self.parallelism.kvp.max * "
                "self.parallelism.kvp.tokensPerGroup])"
            ),
        },
        {
            "rule": (
                "has(self.engine.kvPages) || "
                "quantity(string(self.engine.kvMemory)).compareTo(quantity('1Mi')) >= 0"
            ),
            "fieldPath": ".engine.kvMemory",
            "message": "must be at least 1Mi; use 1Mi or more",
        },
        {
            "rule": ("quantity(string(self.engine.kvMemory)).compareTo(quantity('1024Ti')) <= 0"),
            "fieldPath": ".engine.kvMemory",
            "message": "must be at most 1024Ti; use 40Gi",
        },
        {
            "rule": (
                f"self.replicas * self.parallelism.spp * self.parallelism.kvp.min <= {MAX_PODS}"
            ),
            "fieldPath": ".replicas",
            "message": (
                f"must ask for at most {MAX_PODS} pods; use less, and further resources of the "
                "same model.name"
            ),
        },
        {
            "rule": (
                "!has(self.autoscaling) || self.autoscaling.maxReplicas * self.parallelism.spp * "
                f"self.parallelism.kvp.min <= {MAX_PODS}"
            ),
            "fieldPath": ".autoscaling.maxReplicas",
            "message": (
                f"must ask for at most {MAX_PODS} pods; use less, and further resources of the "
                "same model.name"
            ),
        },
        {
            "rule": (
                "duration(self.scheduling.batchBudget.min) <= "
                "duration(self.scheduling.batchBudget.max)"
            ),
            "fieldPath": ".scheduling.batchBudget.min",
            "message": "must be at most max; lower it or raise max",
            "messageExpression": (
                "'must be at most max, which is %s; use %s or less' "
                ".format([self.scheduling.batchBudget.max, self.scheduling.batchBudget.max])"
            ),
        },
    ),
    "model.source": _ONE_SOURCE,
    "adapters[].source": _ONE_SOURCE,
    "device": (
        {
            "rule": "self.kind != 'Cpu' || !has(self.resource)",
            "fieldPath": ".resource",
            "message": "must be absent when spec.device.kind is Cpu; remove it",
        },
    ),
    "slo.default.ttft.floor": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "slo.default.ttft.multiplier": (
        {
            "rule": "double(string(self)) >= 1.0",
            "message": (
                'must be at least 1: no prefill is faster than on an idle replica; use "1.5"'
            ),
        },
    ),
    "slo.default.tpot": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "slo.classes": (
        {
            "rule": "self.all(each, each.name != 'default')",
            "message": "must differ from default; give each class a name of its own",
        },
        {
            "rule": "self.map(each, each.reservedPercent).sum() <= 100",
            "message": ("must reserve at most 100 percent together; lower their reservedPercent"),
        },
    ),
    "slo.classes[].ttft.floor": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "slo.classes[].ttft.multiplier": (
        {
            "rule": "double(string(self)) >= 1.0",
            "message": (
                'must be at least 1: no prefill is faster than on an idle replica; use "1.5"'
            ),
        },
    ),
    "slo.classes[].tpot": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "scheduling.batchBudget.min": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "scheduling.batchBudget.max": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "scheduling.batchBudget.fixed": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "scheduling.growthTimeout": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
    "network": (
        {
            "rule": "self.transport != 'Tcp' || !has(self.devices) || size(self.devices) == 0",
            "fieldPath": ".devices",
            "message": "must be absent when spec.network.transport is Tcp; remove them",
        },
    ),
    "network.resources": (
        {
            "rule": f"self.all(name, name.matches('{RESOURCE_NAME}'))",
            "message": "must be extended resources with their domain; write rdma/hca",
        },
    ),
    "placement.topologyLevels": (
        {
            "rule": "self.all(level, self.exists_one(other, other == level))",
            "message": "must differ from each other; remove the second one",
        },
    ),
    "placement": (
        {
            "rule": "!has(self.packLevel) || self.packLevel in self.topologyLevels",
            "fieldPath": ".packLevel",
            "message": "must be one of spec.placement.topologyLevels; use one of them",
            "messageExpression": (
                "'must be one of spec.placement.topologyLevels; use one of %s' "
                ".format([self.topologyLevels.join(', ')])"
            ),
        },
    ),
    "autoscaling": (
        {
            "rule": "self.maxReplicas >= self.minReplicas",
            "fieldPath": ".maxReplicas",
            "message": "must be at least minReplicas; raise it or lower minReplicas",
            "messageExpression": (
                "'must be at least minReplicas, which is %d; use %d or more' "
                ".format([self.minReplicas, self.minReplicas])"
            ),
        },
    ),
    "drainTimeout": (
        {
            "rule": "duration(self) > duration('0s')",
            "message": "must be longer than nothing; use 1ms or more",
        },
    ),
}
