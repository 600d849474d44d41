"""Fields of a MedhaReplica with bounds, defaults and texts: the source of the CRD (`make crd`).

The docstring of a field is what `kubectl explain` shows. Names are in snake case here and
in camel case in YAML. Durations and numbers stay text, as the API holds them; properties with a
unit in their name give the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from medha.request import Slo, SloClass
from medha.spec.quantities import Duration, Number, Size, seconds, to_bytes, to_number
from medha.topology import Topology

API_VERSION = "medha.dev/v1beta1"
API_VERSIONS = (API_VERSION, "medha.dev/v1alpha1")
"""Versions of the kind, newest first. All have the same schema, so that a document of any of them
means the same."""
KIND = "MedhaReplica"

NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
RESOURCE_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
RDMA_DEVICE = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?(:[1-9][0-9]?)?$"
ATTACHMENT = r"^[a-z0-9]([-a-z0-9./]*[a-z0-9])?$"
IMAGE = r"^[A-Za-z0-9]([-A-Za-z0-9._:/@+]*[A-Za-z0-9])?$"
WEB_ADDRESS = r"^https?://[^/\s]+(/\S*)?$"
PRINTABLE = r"^[^\x00-\x1f]+$"
MODEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$"
ADAPTER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"


def _text(
    description: str, example: str, max_length: int, pattern: str | None = None
) -> msgspec.Meta:
    """Bound a text; the description completes "it must be ..." in errors."""
    return msgspec.Meta(
        pattern=pattern, max_length=max_length, description=description, examples=[example]
    )


Name = Annotated[
    str, _text("lower-case letters, digits and dashes, at most 40", "llama-70b", 40, NAME)
]
ModelName = Annotated[
    str, _text("letters, digits and . _ : / -, at most 200", "llama-3-70b", 200, MODEL_NAME)
]
AdapterName = Annotated[
    str, _text("letters, digits and . _ -, at most 50", "legal", 50, ADAPTER_NAME)
]
ResourceName = Annotated[
    str, _text("an extended resource with its domain", "nvidia.com/gpu", 316, RESOURCE_NAME)
]
LabelKey = Annotated[
    str, _text("the name of a node label", "topology.kubernetes.io/rack", 316, LABEL_KEY)
]
ObjectName = Annotated[
    str, _text("a name of lower-case letters, digits, dashes and dots", "models", 253, OBJECT_NAME)
]
ImageReference = Annotated[
    str, _text("an image's reference", "registry.example.com/medha-worker:1.0", 512, IMAGE)
]
WebAddress = Annotated[
    str,
    _text(
        "the http or https address of a checkpoint's folder",
        "https://models.example.com/llama",
        512,
        WEB_ADDRESS,
    ),
]
Path = Annotated[
    str, _text("a path of 1 to 1024 characters", "models/llama-3-70b", 1024, PRINTABLE)
]
SubPath = Annotated[str, _text("a path of at most 1024 characters", "v1", 1024)]
LabelValue = Annotated[str, _text("text of at most 63 characters", "gpu", 63)]
Note = Annotated[str, _text("text of at most 4096 characters", "yes", 4096)]
Labels = Annotated[dict[str, LabelValue], msgspec.Meta(max_length=32)]
MAX_PODS = 10_000
"""Pods of a resource, without those of further KVP groups."""
Piece = dict[str, Any]  # of a pod, as Kubernetes defines it
Pieces = Annotated[tuple[Piece, ...], msgspec.Meta(max_length=32)]
RdmaDevice = Annotated[
    str, _text("an RDMA device, with or without a port", "mlx5_0:1", 64, RDMA_DEVICE)
]
AttachmentName = Annotated[
    str, _text("the name of a NetworkAttachmentDefinition", "fabric/rail-0", 317, ATTACHMENT)
]
Devices = Annotated[int, msgspec.Meta(ge=1, le=64)]
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
    """The checkpoint's directory, e.g. /var/lib/models/llama-3-70b."""


class ClaimSource(SpecSection, frozen=True):
    """A directory on a persistent volume."""

    claim_name: ObjectName
    """The PersistentVolumeClaim, in the resource's namespace."""
    path: SubPath = ""
    """The checkpoint's directory below the volume's root."""


class ImageSource(SpecSection, frozen=True):
    """A model inside a container image, mounted as an image volume."""

    reference: ImageReference
    """The image, by digest for preference."""
    path: SubPath = ""
    """The checkpoint's directory below the image's root."""


class CheckpointSource(SpecSection, frozen=True):
    """Location of the checkpoint: exactly one of these."""

    host_path: HostPathSource | None = None
    """A directory of the nodes themselves, the same on each; read-only. A relative path is for
    `medha up` only, relative to the file."""
    pvc: ClaimSource | None = None
    """A directory on a persistent volume that many pods may read at once."""
    image: ImageSource | None = None
    """A container image that holds the checkpoint, mounted as an image volume (Kubernetes 1.33
    or later)."""
    uri: WebAddress | None = None
    """An http or https address from which an init container fetches the checkpoint before the
    ranks start."""


class ModelSpec(SpecSection, frozen=True):
    """Model and checkpoint."""

    name: ModelName
    """The name that clients ask for in `model`, e.g. llama-3-70b. Letters, digits and . _ : / -
    are allowed. Resources of the same name share their requests."""
    source: CheckpointSource
    """Where the checkpoint is (Hugging Face layout: config.json, safetensors, tokenizer.json).
    Exactly one of these."""
    max_context_tokens: Tokens
    """The longest context, prompt and output together. Longer requests are refused with both
    numbers. At most kvp.max × kvp.tokensPerGroup."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The arithmetic of weights and activations; auto is bfloat16 on Cuda and float32 on Cpu."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """How keys and values are kept; auto is as dtype, fp8_e4m3 halves their memory on devices
    of kind Cuda."""


class AdapterSpec(SpecSection, frozen=True):
    """LoRA adapter of the model."""

    name: AdapterName
    """Clients ask for it as `model:name` in `model`. Letters, digits and . _ - are allowed."""
    source: CheckpointSource
    """Where the adapter is, as PEFT saves it (adapter_config.json, adapter_model.safetensors).
    Exactly one of these."""


class DeviceSpec(SpecSection, frozen=True):
    """Device of a rank."""

    kind: Literal["Cuda", "Cpu"] = "Cuda"
    """Cuda takes one GPU per rank; Cpu needs none."""
    resource: ResourceName | None = None
    """The extended resource that a pod requests tp times. Absent: nvidia.com/gpu for Cuda; name
    another one here, such as a MIG slice."""

    @property
    def resource_name(self) -> str:
        return self.resource or ("nvidia.com/gpu" if self.kind == "Cuda" else "")


class KvpSpec(SpecSection, frozen=True):
    """KVP groups: at least `min` run; more come, up to `max`, as contexts outgrow them."""

    min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Groups that always run."""
    max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Groups that run at most. Placement prefers a domain with room for them."""
    tokens_per_group: Tokens | None = None
    """Tokens of one sequence that a group takes before the next joins. Absent: as the predictor
    finds best."""


class ParallelismSpec(SpecSection, frozen=True):
    """Devices per replica = tp × spp × KVP groups."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Tensor parallelism: devices per pod, which share each layer. Must divide the model's KV
    heads and fit into one node."""
    spp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Stream pipeline parallelism: stages, one pod each, that work on successive chunks of the
    same prompt at once. At most the model's layers."""
    kvp: KvpSpec = KvpSpec()
    """KV-cache parallelism: groups that hold the same weights and share one context's keys and
    values. More join while a context outgrows those that run, and leave after
    scheduling.releaseCooldown."""


class TtftTarget(SpecSection, frozen=True):
    """TTFT deadline: max(floor, multiplier × predicted prefill time on an idle replica)."""

    floor: Duration = "500ms"
    """The least deadline, such as 500ms, however short the prompt."""
    multiplier: Number = "1.5"
    """How many times its prefill time on an idle replica a prompt may take: at least 1, and in
    quotes when it has a fraction."""


class SloTargets(SpecSection, frozen=True):
    """Targets of requests without a class."""

    ttft: TtftTarget = TtftTarget()
    """The first token is due max(floor, multiplier × predicted prefill time on an idle replica)
    after the request arrives."""
    tpot: Duration = "30ms"
    """Mean time per output token after the first, such as 30ms."""
    when_infeasible: Literal["Refuse", "Relegate"] = "Refuse"
    """What becomes of a request whose first token cannot come in time. Refuse: 429 at once,
    with the earliest time that could be promised. Relegate: served without a promise, from the
    share scheduling.relegatedPercent and whatever else is left."""


class SloClassSpec(SpecSection, frozen=True):
    """QoS class; absent fields default to `slo.default`."""

    name: Name
    """What requests put into x-medha-class, such as interactive."""
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Its share against other classes when not everything fits: 4 gets four times what 1 gets."""
    reserved_percent: Percent = 0
    """Part of a replica's time that promises of other classes leave to it."""
    ttft: TtftTarget | None = None
    """As slo.default.ttft, for this class."""
    tpot: Duration | None = None
    """As slo.default.tpot, for this class."""
    when_infeasible: Literal["Refuse", "Relegate"] | None = None
    """As slo.default.whenInfeasible, for this class."""


class SloSpec(SpecSection, frozen=True):
    default: SloTargets = SloTargets()
    """What requests without a class get."""
    classes: Annotated[tuple[SloClassSpec, ...], msgspec.Meta(max_length=16)] = ()
    """QoS classes besides `default`; absent fields come from slo.default."""


class BatchBudgetSpec(SpecSection, frozen=True):
    """Time budget of a batch: the decodes' Slack in [min, max], Fixed, or a number of Tokens."""

    mode: Literal["Slack", "Fixed", "Tokens"] = "Slack"
    """Slack: as long as the running decodes can spare, within min and max. Fixed: always
    `fixed`. Tokens: a number of tokens, whatever they cost."""
    min: Duration = "10ms"
    """The least in mode Slack."""
    max: Duration = "100ms"
    """The most in mode Slack. Smaller is more responsive, and less efficient."""
    fixed: Duration = "50ms"
    """The budget in mode Fixed."""
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2048
    """Tokens per batch in mode Tokens."""


class SchedulingSpec(SpecSection, frozen=True):
    """Order of requests, batches and promises of a replica.

    `relegatedPercent` is at most 40, since up to half of the time is reserved for short requests to
    come, and promises need the rest.
    """

    policy: Literal["LARS", "LARSPaper", "LARSPaperNoSharing", "LRS", "EDF", "SRPF", "FCFS"] = (
        "LARS"
    )
    """The order of prefills. LARS: relative slack with a set of promises that are kept;
    LARSPaper and LARSPaperNoSharing: as published; LRS: least relative slack; EDF: earliest
    deadline; SRPF: shortest remaining prefill; FCFS: first come. LARS is for serving, the
    others are there to compare."""
    normaliser: Literal["Work", "Deadline"] = "Work"
    """What slack is divided by: the request's total work, or its time from arrival to deadline."""
    batch_budget: BatchBudgetSpec = BatchBudgetSpec()
    """How long a batch may take on a stage, and thus how soon a newcomer is considered."""
    max_yield_percent: Percent = 40
    """How much of a batch a long prefill may cede to short ones, in proportion to its slack."""
    relegated_percent: Annotated[int, msgspec.Meta(ge=0, le=40)] = 10
    """Part of the time kept for requests without a promise, so that they progress: where a class
    relegates, or while one of them waits."""
    max_bucket_loss_percent: Percent = 100
    """Of the prompts of a length (up to 1k, 8k, 32k, 128k, 384k, 1m tokens, or more), over ten
    minutes, at most this part gives way to others. 100: with more work than can be done in time
    the longest prompts give way, which keeps the most deadlines. Less: once they have lost
    their part, others do. No promise is broken for it."""
    promises: Literal["Commit", "Revise"] = "Commit"
    """Commit: a promise once given is kept. Revise: more urgent requests that come later may
    displace it."""
    long_prefill_threshold_tokens: Tokens | None = None
    """The most tokens of one prompt per batch. Absent: no such limit; LARS needs none."""
    long_tokens: Tokens | None = None
    """A prompt of this many tokens counts as long. Absent: one whose work exceeds eight batches."""
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    """Sequences that a replica decodes at once."""
    prefix_cache: Switch = "Enabled"
    """Whether pages of earlier prompts are used again for prompts that begin alike."""
    rebalance: Switch = "Enabled"
    """Whether pages move to a group that joins; otherwise only later tokens go there."""
    decide_ahead: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    """Whether replicas of one stage decide the next batch while one runs, ten milliseconds
    before it ends at most. Auto: where a GPU computes."""
    growth_timeout: Duration = "2m"
    """How long a request waits for a KVP group that it needs before it is refused."""
    release_cooldown: Duration = "30s"
    """How long a KVP group beyond kvp.min stays unused before it is given back."""


class EngineSpec(SpecSection, frozen=True):
    """Engine of a rank."""

    page_tokens: Literal[16, 32, 64, 128, 256] = 64
    """Tokens of one page, the piece in which keys and values are kept, shared and moved."""
    kv_memory: Size = "1Gi"
    """Memory of each rank for keys and values, such as 40Gi; at least 1Mi."""
    kv_pages: Annotated[int, msgspec.Meta(ge=2, le=1 << 24)] | None = None
    """Pages of each KVP group; wins over kvMemory."""
    threads_per_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Processor threads of each rank's arithmetic; matters on devices of kind Cpu."""
    arithmetic: Literal["Fast", "Deterministic"] = "Fast"
    """Deterministic: the same prompt gives the same bits whatever it is batched with, at some
    cost."""
    packed_weights: Switch = "Disabled"
    """Weights that stay packed in memory, of bfloat16's: FP8 half, 4 bits (AWQ, GPTQ) 27 %. FP8 is
    dequantised at each use, which takes time. 4 bits: faster decodes, slower prefills; need a dense
    model and groups of 32 to 256 inputs without desc_act."""
    checked_transfers: Switch = "Enabled"
    """Whether pages that moved between ranks are compared with their digests before use."""
    standby_ranks: Switch = "Enabled"
    """Keep a process in standby for each rank, which takes over without importing its libraries if
    the rank fails: some 0.3 GiB of host memory each."""

    @property
    def kv_bytes(self) -> int:
        return to_bytes(self.kv_memory)


class NetworkSpec(SpecSection, frozen=True):
    """Network between the pods of a replica: hidden states between stages, pages between groups."""

    transport: Literal["Auto", "Rdma", "Tcp"] = "Auto"
    """Auto: RDMA (InfiniBand, RoCE) between ranks that both have a usable device, else TCP. Rdma:
    nothing else; a pod without a usable device ends with the reason. Tcp: never RDMA."""
    devices: Annotated[tuple[RdmaDevice, ...], msgspec.Meta(max_length=32)] = ()
    """RDMA devices or ports, such as mlx5_0 or mlx5_0:1. Absent: all that are usable."""
    gpu_direct: Switch = "Enabled"
    """Direct access of RDMA devices to the memory of GPUs, where drivers allow it."""
    resources: Annotated[dict[str, Devices], msgspec.Meta(max_length=8)] = {}
    """Extended resources that give a pod its RDMA devices, such as {rdma/hca_shared_devices_a: 1}.
    Each pod requests them."""
    attachments: Annotated[tuple[AttachmentName, ...], msgspec.Meta(max_length=32)] = ()
    """Secondary networks of the pods for Multus: names of NetworkAttachmentDefinitions, of this
    namespace or as namespace/name."""
    ipc_lock: Switch = "Disabled"
    """Permission of ranks to lock any amount of memory, which RDMA needs where the container
    runtime limits it. Kubernetes gives IPC_LOCK to root only: the container then runs as root
    without any other capability, which the Pod Security standard restricted forbids."""


class PlacementSpec(SpecSection, frozen=True):
    """Nodes of the pods."""

    topology_levels: Annotated[tuple[LabelKey, ...], msgspec.Meta(max_length=8)] = (
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/rack",
        "nvidia.com/gpu.clique",
        "kubernetes.io/hostname",
    )
    """Node labels from the widest domain to the narrowest. Stages of a group are kept close in
    these."""
    pack_level: LabelKey | None = None
    """One of topologyLevels: all groups of a replica stay inside one such domain. Absent:
    anywhere."""
    node_selector: Labels = {}
    """Labels that a node must have."""
    tolerations: Pieces = ()
    """Taints that the pods put up with, as in a pod's own tolerations."""


class AutoscalingSpec(SpecSection, frozen=True):
    """Scaling by slack."""

    mode: Literal["Builtin", "External"] = "Builtin"
    """Builtin: only the operator should write spec.replicas. External: it only exports what it
    would write, for an HPA or KEDA."""
    min_replicas: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    """Never fewer; 0 lets an idle model give all its devices back."""
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Never more."""
    target_slack_p10: Number = msgspec.field(default="0.2", name="targetSlackP10")
    """Replicas are added when the tenth percentile of relative slack at arrival stays below
    this."""
    scale_down_stabilization: Duration = "10m"
    """How long fewer replicas must have been enough before one is taken away."""


class TemplateSpec(SpecSection, frozen=True):
    """Overrides of the pods; ignored by `medha up`."""

    image: ImageReference | None = None
    """The worker's image; absent: the one that the operator was installed with."""
    resources: Piece = {}
    """Requests and limits of a pod's container, such as {limits: {memory: 64Gi}}. The device's
    resource is added to them, unless there are claims."""
    env: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=64)] = ()
    """Further environment, as in a container's own env; names with MEDHA_ are the operator's,
    but for MEDHA_DECISION_LOG and MEDHA_INTERFACE."""
    volumes: Pieces = ()
    """Further volumes, as in a pod's own."""
    volume_mounts: Pieces = ()
    """Where further volumes are mounted, as in a container's own."""
    resource_claims: Pieces = ()
    """Claims of devices (Dynamic Resource Allocation), as in a pod's own; name those of the
    container in resources.claims."""
    scheduler_name: ObjectName | None = None
    """The scheduler that binds the pods, such as volcano; absent: the cluster's own."""
    priority_class_name: ObjectName | None = None
    """The pods' PriorityClass."""
    labels: Labels = {}
    """Further labels of the pods; those with medha.dev/ are the operator's."""
    annotations: Annotated[dict[str, Note], msgspec.Meta(max_length=32)] = {}
    """Further annotations of the pods."""


class MedhaReplicaSpec(SpecSection, frozen=True, kw_only=True):
    replicas: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    """How many identical copies of the model serve. Each takes tp × spp × (KVP groups) devices.
    `kubectl scale mr NAME --replicas=N` and autoscalers write this field. At 0 routers hold
    requests for a while rather than refuse them."""
    role: Literal["Unified"] = "Unified"
    """Unified replicas do both prefill and decode. Roles of disaggregated fleets will be
    further values."""
    model: ModelSpec
    """What is served, and where its checkpoint lies."""
    adapters: Annotated[tuple[AdapterSpec, ...], msgspec.Meta(max_length=32)] = ()
    """LoRA adapters that every replica loads with the model. A request names one as model:name;
    requests of all adapters share batches, and cached pages only with their own adapter's."""
    device: DeviceSpec = DeviceSpec()
    """What the ranks compute on."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How one replica is spread: tp × spp devices hold the weights once and form a KVP group; a
    replica has kvp.min to kvp.max such groups."""
    slo: SloSpec = SloSpec()
    """Deadlines. A request's class (its header x-medha-class) gives its targets; headers of its
    own override them."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """How a replica decides what to compute next."""
    engine: EngineSpec = EngineSpec()
    """What each rank has to work with."""
    network: NetworkSpec = NetworkSpec()
    """Exchange of data between ranks of different pods."""
    placement: PlacementSpec = PlacementSpec()
    """Which nodes, and how close together."""
    autoscaling: AutoscalingSpec | None = None
    """Scaling by queue slack. Absent: only people write spec.replicas."""
    template: TemplateSpec = TemplateSpec()
    """Overrides of the pods. `medha up` starts processes and has no use for them."""
    drain_timeout: Duration = "1h"
    """How long a replica that is replaced or removed may finish what it runs. A million tokens
    take their time; what is left after it moves to another replica."""

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

    The API server assigns `uid` and `generation`; a resource from a file has none. `api_version`
    is the version in which it was read; references to it name the same.
    """

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    labels: Mapping[str, str] = {}
    api_version: str = API_VERSION
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
