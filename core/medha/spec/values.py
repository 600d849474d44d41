"""Fields of a MedhaReplica with bounds and defaults, in the order of the documentation.

Field names are the resource's, in snake case here and camel case in YAML. Durations and numbers
stay text, as the API holds them; properties with a unit in their name give the values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from medha.request import Slo, SloClass
from medha.spec.quantities import Duration, Number, Size, seconds, to_bytes, to_number
from medha.topology import Topology

API_VERSION = "medha.dev/v1alpha1"
KIND = "MedhaReplica"

NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
RESOURCE_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
MODEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$"

Name = Annotated[
    str,
    msgspec.Meta(
        pattern=NAME,
        max_length=40,
        description="lower-case letters, digits and dashes, at most 40",
        examples=["llama-70b"],
    ),
]
ModelName = Annotated[
    str,
    msgspec.Meta(
        pattern=MODEL_NAME,
        max_length=200,
        description="letters, digits and . _ : / -, at most 200",
        examples=["llama-3-70b"],
    ),
]
ResourceName = Annotated[
    str,
    msgspec.Meta(
        pattern=RESOURCE_NAME,
        max_length=316,
        description="an extended resource with its domain",
        examples=["nvidia.com/gpu"],
    ),
]
Path = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=1024,
        description="a path of 1 to 1024 characters",
        examples=["models/llama-3-70b"],
    ),
]
Text = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=512, description="text of 1 to 512 characters", examples=["a name"]
    ),
]
SubPath = Annotated[
    str,
    msgspec.Meta(max_length=1024, description="a path of at most 1024 characters", examples=["v1"]),
]
LabelValue = Annotated[
    str,
    msgspec.Meta(max_length=63, description="text of at most 63 characters", examples=["gpu"]),
]
Note = Annotated[
    str,
    msgspec.Meta(max_length=4096, description="text of at most 4096 characters", examples=["yes"]),
]
Labels = Annotated[dict[str, LabelValue], msgspec.Meta(max_length=32)]
Piece = dict[str, Any]  # of a pod, as Kubernetes defines it
Pieces = Annotated[tuple[Piece, ...], msgspec.Meta(max_length=32)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=12_000_000)]
Switch = Literal["Enabled", "Disabled"]


class SpecSection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Base of all sections of the resource: frozen, camel case in YAML, unknown fields refused."""


class HostPathSource(SpecSection, frozen=True):
    """A directory of the machine; for `medha up` relative to the resource file."""

    path: Path


class ClaimSource(SpecSection, frozen=True):
    """A directory on a persistent volume."""

    claim_name: Text
    path: SubPath = ""


class ImageSource(SpecSection, frozen=True):
    """A model inside a container image, mounted as an image volume."""

    reference: Text
    path: SubPath = ""


class CheckpointSource(SpecSection, frozen=True):
    """Location of the checkpoint: exactly one of these."""

    host_path: HostPathSource | None = None
    pvc: ClaimSource | None = None
    image: ImageSource | None = None
    uri: Text | None = None


class ModelSpec(SpecSection, frozen=True):
    """`dtype` Auto: bfloat16 on Cuda, float32 on Cpu. `kvCacheDtype` auto: as `dtype`."""

    name: ModelName
    source: CheckpointSource
    max_context_tokens: Tokens
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"


class DeviceSpec(SpecSection, frozen=True):
    """`resource`: the Kubernetes resource that a pod requests per rank; none for Cpu."""

    kind: Literal["Cuda", "Cpu"] = "Cuda"
    resource: ResourceName | None = None

    @property
    def resource_name(self) -> str:
        return self.resource or ("nvidia.com/gpu" if self.kind == "Cuda" else "")


class KvpSpec(SpecSection, frozen=True):
    """KVP groups: at least `min` run; more come, up to `max`, as contexts outgrow them.

    `tokensPerGroup` of one sequence go into a group before the next joins; absent: predicted.
    """

    min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    tokens_per_group: Tokens | None = None


class ParallelismSpec(SpecSection, frozen=True):
    """Devices per replica = tp × spp × KVP groups."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    spp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    kvp: KvpSpec = KvpSpec()


class TtftTarget(SpecSection, frozen=True):
    """TTFT deadline: max(floor, multiplier × predicted prefill time on an idle replica)."""

    floor: Duration = "500ms"
    multiplier: Number = "1.5"


class SloTargets(SpecSection, frozen=True):
    """Targets of requests without a class."""

    ttft: TtftTarget = TtftTarget()
    tpot: Duration = "30ms"
    when_infeasible: Literal["Refuse", "Relegate"] = "Refuse"


class SloClassSpec(SpecSection, frozen=True):
    """QoS class; absent fields default to `slo.default`."""

    name: Name
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    reserved_percent: Percent = 0
    ttft: TtftTarget | None = None
    tpot: Duration | None = None
    when_infeasible: Literal["Refuse", "Relegate"] | None = None


class SloSpec(SpecSection, frozen=True):
    default: SloTargets = SloTargets()
    classes: Annotated[tuple[SloClassSpec, ...], msgspec.Meta(max_length=16)] = ()


class BatchBudgetSpec(SpecSection, frozen=True):
    """Time budget of a batch: the decodes' Slack in [min, max], Fixed, or a number of Tokens."""

    mode: Literal["Slack", "Fixed", "Tokens"] = "Slack"
    min: Duration = "10ms"
    max: Duration = "100ms"
    fixed: Duration = "50ms"
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2048


class SchedulingSpec(SpecSection, frozen=True):
    """`promises` Commit: a promise is kept; Revise: later requests may displace it.

    `decideAhead`: a replica of one stage decides the next batch while one runs; Auto: on GPUs.
    `relegatedPercent`: at most 40, since up to half of the time is reserved for short requests to
    come, and promises need the rest. `maxBucketLossPercent` 100: the largest request loses first.
    """

    policy: Literal["LARS", "LARSPaper", "LARSPaperNoSharing", "LRS", "EDF", "SRPF", "FCFS"] = (
        "LARS"
    )
    normaliser: Literal["Work", "Deadline"] = "Work"
    batch_budget: BatchBudgetSpec = BatchBudgetSpec()
    max_yield_percent: Percent = 40
    relegated_percent: Annotated[int, msgspec.Meta(ge=0, le=40)] = 10
    max_bucket_loss_percent: Percent = 100
    promises: Literal["Commit", "Revise"] = "Commit"
    long_prefill_threshold_tokens: Tokens | None = None
    long_tokens: Tokens | None = None
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    prefix_cache: Switch = "Enabled"
    rebalance: Switch = "Enabled"
    decide_ahead: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    growth_timeout: Duration = "2m"
    release_cooldown: Duration = "30s"


class EngineSpec(SpecSection, frozen=True):
    """Engine of a rank. `kvPages` per group takes precedence over `kvMemory` per rank."""

    page_tokens: Literal[16, 32, 64, 128, 256] = 64
    kv_memory: Size = "1Gi"
    kv_pages: Annotated[int, msgspec.Meta(ge=2, le=1 << 24)] | None = None
    threads_per_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    arithmetic: Literal["Fast", "Deterministic"] = "Fast"
    checked_transfers: Switch = "Enabled"

    @property
    def kv_bytes(self) -> int:
        return to_bytes(self.kv_memory)


class PlacementSpec(SpecSection, frozen=True):
    """Node labels from the widest domain to the narrowest; a replica stays inside one packLevel."""

    topology_levels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)] = (
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/rack",
        "nvidia.com/gpu.clique",
        "kubernetes.io/hostname",
    )
    pack_level: Text | None = None
    node_selector: Labels = {}
    tolerations: Pieces = ()


class AutoscalingSpec(SpecSection, frozen=True):
    """Builtin: the operator writes /scale; External: it exports the desired number."""

    mode: Literal["Builtin", "External"] = "Builtin"
    min_replicas: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    target_slack_p10: Number = msgspec.field(default="0.2", name="targetSlackP10")
    scale_down_stabilization: Duration = "10m"


class TemplateSpec(SpecSection, frozen=True):
    """Overrides of the pods; ignored by `medha up`."""

    image: Text | None = None
    resources: Piece = {}
    env: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=64)] = ()
    volumes: Pieces = ()
    volume_mounts: Pieces = ()
    scheduler_name: Text | None = None
    priority_class_name: Text | None = None
    labels: Labels = {}
    annotations: Annotated[dict[str, Note], msgspec.Meta(max_length=32)] = {}


class MedhaReplicaSpec(SpecSection, frozen=True, kw_only=True):
    replicas: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    role: Literal["Unified"] = "Unified"
    model: ModelSpec
    device: DeviceSpec = DeviceSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    slo: SloSpec = SloSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    engine: EngineSpec = EngineSpec()
    placement: PlacementSpec = PlacementSpec()
    autoscaling: AutoscalingSpec | None = None
    template: TemplateSpec = TemplateSpec()
    drain_timeout: Duration = "1h"

    @property
    def topology(self) -> Topology:
        kvp = self.parallelism.kvp
        return Topology(
            tp=self.parallelism.tp,
            spp=self.parallelism.spp,
            kvp_min=kvp.min,
            kvp_max=kvp.max,
            tokens_per_group=kvp.tokens_per_group,
        )

    @property
    def classes(self) -> tuple[SloClass, ...]:
        """Every class, `default` first."""
        default = self.slo.default
        plain = SloClassSpec(name="default")
        return tuple(_slo_class(targets, default) for targets in (plain, *self.slo.classes))


class MedhaReplica(msgspec.Struct, frozen=True, kw_only=True):
    """Resource: `spec.replicas` identical 3D-parallel copies of a model.

    The API server assigns `uid` and `generation`; a resource from a file has none.
    """

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    spec: MedhaReplicaSpec


def _slo_class(of: SloClassSpec, default: SloTargets) -> SloClass:
    ttft = of.ttft or default.ttft
    slo = Slo(
        ttft_floor_s=seconds(ttft.floor),
        ttft_multiplier=to_number(ttft.multiplier),
        tpot_s=seconds(of.tpot or default.tpot),
    )
    when = (of.when_infeasible or default.when_infeasible).lower()
    return SloClass(
        name=of.name,
        slo=slo,
        weight=float(of.weight),
        reserved=of.reserved_percent / 100,
        when_infeasible=when,
    )
