{{/* Names, labels and pieces that several templates share. */}}

{{/* `medha` for a release of that name, else <release>-medha; at most 40 characters. */}}
{{- define "medha.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a component's pods are selected by. Takes (list $ "router"). */}}
{{- define "medha.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: medha-{{ index . 1 }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end -}}

{{- define "medha.labels" -}}
{{- $root := index . 0 -}}
{{ include "medha.selector" . }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/part-of: medha
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* A component's image: its own reference, else the registry's by tag or digest. */}}
{{- define "medha.image" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- with $root.Values.image -}}
{{- $version := .tag | empty | ternary (print "@" (get (.digests | default dict) $component)) (print ":" .tag) -}}
{{- $made := printf "%s/medha-%s%s" .registry $component $version -}}
{{- (index $root.Values $component).image | default $made -}}
{{- end -}}
{{- end -}}

{{- define "medha.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Pod Security "restricted": no root, no rights, no new ones. */}}
{{- define "medha.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "medha.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where a component's pods go. */}}
{{- define "medha.scheduling" -}}
{{- $root := index . 0 -}}
{{- $of := index $root.Values (index . 1) -}}
{{- with $of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
# Leave an unreachable node at once: without an operator nothing is repaired.
tolerations:
- {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 5}
- {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 5}
{{- with $of.tolerations }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- with $of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
affinity:
{{- if $of.affinity }}
{{- toYaml $of.affinity | nindent 2 }}
{{- else }}
  # Another node first, then another zone where nodes have one.
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    {{- $selector := include "medha.selector" . }}
    {{- range $key, $weight := dict "kubernetes.io/hostname" 100 "topology.kubernetes.io/zone" 50 }}
    - weight: {{ $weight }}
      podAffinityTerm:
        topologyKey: {{ $key }}
        labelSelector:
          matchLabels: {{- $selector | nindent 12 }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Whether monitors are rendered: wanted, and the cluster knows the kind. */}}
{{- define "medha.monitors" -}}
{{- $known := .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
{{- if and .Values.monitoring.enabled $known }}yes{{ end -}}
{{- end -}}

{{/* Plain annotations for a Prometheus that discovers pods by them. Takes (list $ "8001"). */}}
{{- define "medha.scrape" -}}
{{- $root := index . 0 -}}
{{- if and $root.Values.monitoring.enabled (not (include "medha.monitors" $root)) -}}
prometheus.io/scrape: "true"
prometheus.io/path: /metrics
prometheus.io/port: {{ index . 1 | quote }}
{{- end -}}
{{- end -}}

{{/* The Secret with the API keys. */}}
{{- define "medha.apiKeys" -}}
{{- .Values.router.apiKeys.existingSecret | default (printf "%s-router-api-keys" (include "medha.name" .)) -}}
{{- end -}}

{{/* router.json: what medha.config.RouterConfig decodes. */}}
{{- define "medha.config" -}}
{{- $c := .Values.router.config -}}
{{- $keys := "/etc/medha/keys" -}}
{{- dict
  "host" "0.0.0.0" "port" 8000 "ops_port" 8001
  "fleet_bind" "tcp://0.0.0.0:7800"
  "processes" (int64 .Values.router.processes)
  "models" list "learn" true
  "models_file" "/etc/medha/models/models.json"
  "curve" (dict
    "secret" (print $keys "/router.secret")
    "allowed" (print $keys "/controller.public"))
  "api_keys" (ternary "/etc/medha/api-keys/keys" "" .Values.router.apiKeys.enabled)
  "max_body_bytes" (int64 $c.maxBodyBytes)
  "memory_limit_bytes" (int64 $c.memoryLimitBytes)
  "max_queue" (int64 $c.maxQueue)
  "queue_timeout_s" (float64 $c.queueTimeoutSeconds)
  "no_replica_timeout_s" (float64 $c.noReplicaTimeoutSeconds)
  "recovery_timeout_s" (float64 $c.recoveryTimeoutSeconds)
  "keepalive_s" (float64 $c.keepaliveSeconds)
  "drain_timeout_s" (max 0 (sub (int64 .Values.router.terminationGraceSeconds) 10) | float64)
  "default_output_tokens" (int64 $c.defaultOutputTokens)
  "generation_defaults" $c.generationDefaults
  "split_thinking" $c.splitThinking
  "tokenizer_workers" (int64 $c.tokenizerWorkers)
  "class_headers" $c.classHeaders
  "share_cache" $c.shareCache
  "allowed_origins" $c.allowedOrigins
  "run_dir" "/tmp"
  "log_level" .Values.router.logLevel
  | mustToPrettyJson -}}
{{- end -}}

{{/* The ports on which controllers dial a router: one for each of its processes. */}}
{{- define "medha.fleetPorts" -}}
{{- $processes := int64 .Values.router.processes -}}
{{- $port := dict "port" 7800 -}}
{{- if gt $processes 1 -}}
{{- $_ := set $port "endPort" (add 7799 $processes) -}}
{{- end -}}
{{- list $port | toJson -}}
{{- end -}}

{{/* Pods of a component, for policies that may stand in another namespace. */}}
{{- define "medha.peer" -}}
{{- $root := index . 0 -}}
namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ $root.Release.Namespace }}}}
podSelector:
  matchLabels: {{- include "medha.selector" . | nindent 4 }}
{{- end -}}

{{/* Who may scrape metrics, as NetworkPolicyPeers. */}}
{{- define "medha.monitoring" -}}
{{- .Values.networkPolicy.monitoring | default (list (dict "namespaceSelector" dict)) | toJson -}}
{{- end -}}

{{/* The ports on which names are resolved. */}}
{{- define "medha.dns" -}}
{{- list (dict "protocol" "UDP" "port" 53) (dict "protocol" "TCP" "port" 53) | toJson -}}
{{- end -}}

{{/* What goes in and out of a replica's pods besides what they say to each other: the operator makes a
     NetworkPolicy of it for each replica. Empty: none. */}}
{{- define "medha.workerFlows" -}}
{{- with .Values.networkPolicy -}}
{{- if .enabled -}}
{{- $operator := include "medha.peer" (list $ "operator") | fromYaml -}}
{{- $router := include "medha.peer" (list $ "router") | fromYaml -}}
{{- $monitoring := include "medha.monitoring" $ | fromJsonArray -}}
{{- $metrics := list (dict "port" 8090) (dict "port" 8091) -}}
{{- dict
  "ingress" (list
    (dict "from" (list $operator) "ports" (list (dict "port" 8091)))
    (dict "from" $monitoring "ports" $metrics))
  "egress" (concat (list
    (dict "ports" (include "medha.dns" $ | fromJsonArray))
    (dict "to" (list $router) "ports" (include "medha.fleetPorts" $ | fromJsonArray))) .modelEgress)
  | toJson -}}
{{- end -}}
{{- end -}}
{{- end -}}
