"""Another value for each value of the chart, for tests of upgrades."""

from __future__ import annotations

from typing import Any

PODS: dict[str, Any] = {
    "resources": {"requests": {"cpu": "60m"}},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"a": "b"},
    "podLabels": {"a": "b"},
}
"""Values that the pods of operator and routers share."""

CHANGED: dict[str, dict[str, Any]] = {
    "image": {
        "registry": "r.example",
        "digests": dict.fromkeys(("operator", "router", "worker"), "sha256:" + "b" * 64),
        "tag": "2",
        "pullPolicy": "Always",
        "pullSecrets": ["a"],
    },
    "operator": {
        "image": "r.example/o:2",
        "replicas": 2,
        "namespaces": ["default"],
        "logLevel": "debug",
        "workers": 8,
        "resyncSeconds": 20,
        "reportSeconds": 1,
        "prometheus": "http://prometheus:9090",
        "leaseSeconds": 20,
        **PODS,
        "serviceAccountAnnotations": {"a": "b"},
    },
    "router": {
        "image": "r.example/r:2",
        "replicas": 3,
        "processes": 2,
        "logLevel": "debug",
        "terminationGraceSeconds": 60,
        **PODS,
    },
    "router.config": {
        "maxBodyBytes": 1 << 20,
        "memoryLimitBytes": 1 << 30,
        "maxQueue": 10,
        "queueTimeoutSeconds": 10,
        "noReplicaTimeoutSeconds": 10,
        "recoveryTimeoutSeconds": 10,
        "keepaliveSeconds": 10,
        "defaultOutputTokens": 10,
        "generationDefaults": False,
        "splitThinking": False,
        "tokenizerWorkers": 2,
        "classHeaders": {"x-tier": {"gold": "interactive"}},
        "shareCache": True,
        "allowedOrigins": ["*"],
    },
    "router.apiKeys": {"enabled": True, "existingSecret": "keys"},
    "router.service": {
        "type": "NodePort",
        "port": 80,
        "nodePort": 30081,
        "annotations": {"a": "b"},
    },
    "router.podDisruptionBudget": {"maxUnavailable": 2},
    "router.ingress": {
        "className": "nginx",
        "annotations": {"a": "b"},
        "host": "llm.example.com",
        "tlsSecret": "cert",
        "enabled": False,
    },
    "router.httpRoute": {
        "parentRefs": [{"name": "public"}],
        "hostnames": ["llm.example.com"],
        "enabled": False,
    },
    "worker": {"image": "r.example/w:2"},
    "networkPolicy": {
        "clients": [{"podSelector": {}}],
        "monitoring": [{"podSelector": {}}],
        "apiServer": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "apiServerPorts": [6443],
        "modelEgress": [{"ports": [{"port": 443}]}],
        "enabled": False,
    },
    "monitoring.rules": {"objective": 0.95, "runbook": "https://r.example", "enabled": False},
    "monitoring.dashboards": {"labels": {"a": "b"}, "annotations": {"a": "b"}, "enabled": False},
    "monitoring": {"labels": {"a": "b"}, "interval": "30s", "enabled": False},
}
"""Another value for each value of the chart, by section; what switches a section off comes last."""
FIRST = {
    "image.tag": "",
    "image.digests": dict.fromkeys(("operator", "router", "worker"), "sha256:" + "a" * 64),
    "router.ingress.enabled": True,
    "router.httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
}
