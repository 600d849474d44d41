"""The chart's objects agree with each other, and its options change them."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.charts.rendered import Objects, Render, environment, kinds, select, template

from medha.config import RouterConfig
from medha_operator.kube.lease import NAME as LEASE
from medha_operator.kube.secrets import FLEET_KEYS, PAIRS
from medha_operator.settings import Settings, from_environment
from medha_router.auth import ApiKeys

DIGEST = "sha256:" + "a" * 64
HOUSE = Path(__file__).resolve().parents[2]

GATEWAY = ("gateway.networking.k8s.io/v1",)


def pod_specs(objects: Objects) -> dict[str, dict[str, Any]]:
    """The pod specs, by the name of the pod or its Deployment."""
    services = {}
    for document in objects:
        if document["kind"] == "Pod":
            services[document["metadata"]["name"]] = document["spec"]
        if document["kind"] == "Deployment":
            services[document["metadata"]["name"]] = document["spec"]["template"]["spec"]
    return services


def router_config(objects: Objects) -> RouterConfig:
    text = select(objects, "ConfigMap", "medha-router")["data"]["router.json"]
    return msgspec.json.decode(text, type=RouterConfig)


def test_both_charts_pass_helm_lint(
    run_helm: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_helm("lint", "medha", "medha-crds", "--strict", "--kube-version=1.36.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout and "ERROR" not in done.stdout


def test_the_chart_of_the_crds_holds_the_crd_byte_for_byte() -> None:
    for crd in (HOUSE / "crds").iterdir():
        copy = HOUSE / "charts/medha-crds/templates" / crd.name
        assert copy.read_bytes() == crd.read_bytes()
    assert len(list((HOUSE / "charts/medha-crds/templates").iterdir())) == 1


def test_the_routers_file_is_a_valid_router_config(objects: Objects) -> None:
    config = router_config(objects)
    assert config.models == () and config.learn
    assert (config.port, config.ops_port) == (8000, 8001)
    assert config.fleet_bind.endswith(":7800")


def test_the_routers_settings_reach_its_file(render: Render) -> None:
    config = router_config(
        render(
            {
                "router.config.maxQueue": 7,
                "router.config.keepaliveSeconds": 2.5,
                "router.config.maxBodyBytes": 1 << 33,
                "router.config.memoryLimitBytes": 3 << 30,
                "router.logLevel": "debug",
                "router.processes": 4,
                "router.config.shareCache": True,
                "router.config.allowedOrigins": ["https://a.example"],
                "router.config.classHeaders": {"x-tier": {"gold": "interactive"}},
            }
        )
    )
    assert config.share_cache and config.class_headers == {"x-tier": {"gold": "interactive"}}
    assert (config.max_queue, config.keepalive_s, config.log_level) == (7, 2.5, "debug")
    assert (config.max_body_bytes, config.memory_limit_bytes) == (1 << 33, 3 << 30)
    assert config.processes == 4 and config.allowed_origins == ("https://a.example",)


def test_routers_end_their_streams_before_their_pods_are_killed(render: Render) -> None:
    objects = render({"router.terminationGraceSeconds": 90})
    spec = template(objects, "medha-router")["spec"]
    (container,) = spec["containers"]
    asleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains_s = router_config(objects).drain_timeout_s
    assert drains_s == 80.0 and asleep_s + drains_s < spec["terminationGracePeriodSeconds"]


def test_a_changed_config_file_rolls_the_router_pods(objects: Objects, render: Render) -> None:
    changed = render({"router.config.maxQueue": 7})
    sums = [
        template(documents, "medha-router")["metadata"]["annotations"]["checksum/config"]
        for documents in (objects, changed)
    ]
    assert sums[0] != sums[1]
    assert template(objects, "medha-operator") == template(changed, "medha-operator")


def test_the_router_mounts_the_keys_that_its_file_names(objects: Objects) -> None:
    config, spec = router_config(objects), template(objects, "medha-router")["spec"]
    (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    assert secret["secretName"] == FLEET_KEYS
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "keys"]
    assert config.curve is not None
    files = {f"{mount['mountPath']}/{item['path']}" for item in secret["items"]}
    assert files == {config.curve.secret, config.curve.allowed}
    keys = {f"{pair}.{half}" for pair in PAIRS for half in ("public", "secret")}
    assert {item["key"] for item in secret["items"]} <= keys


def test_the_api_is_open_by_default(objects: Objects) -> None:
    assert router_config(objects).api_keys == "" and not router_config(objects).share_cache
    assert not [
        document for document in objects if document["metadata"]["name"].endswith("api-keys")
    ]


def test_a_release_with_api_keys_makes_one_and_its_routers_get_only_the_hash(
    render: Render, tmp_path: Path
) -> None:
    objects = render({"router.apiKeys.enabled": True})
    data = select(objects, "Secret", "medha-router-api-keys")["data"]
    key, keys = (base64.b64decode(data[entry]) for entry in ("key", "keys"))
    assert len(key) > 40 and key.startswith(b"sk-") and key not in keys
    assert key_file(objects) == ("medha-router-api-keys", router_config(objects).api_keys)
    (tmp_path / "keys").write_bytes(keys)
    client = ApiKeys(tmp_path / "keys").client(key)
    assert client is not None and client.tenant == "default"
    again = select(render({"router.apiKeys.enabled": True}), "Secret", "medha-router-api-keys")
    assert again["data"]["key"] != data["key"]


def test_routers_take_api_keys_from_an_existing_secret(render: Render) -> None:
    objects = render({"router.apiKeys": {"enabled": True, "existingSecret": "mine"}})
    assert {
        document["metadata"]["name"] for document in objects if document["kind"] == "Secret"
    } == {FLEET_KEYS}
    assert key_file(objects) == ("mine", router_config(objects).api_keys)


def key_file(objects: Objects) -> tuple[str, str]:
    """The Secret with the API keys, and the path of its one file in the routers."""
    spec = template(objects, "medha-router")["spec"]
    (volume,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "api-keys"]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "api-keys"]
    (item,) = volume["items"]
    assert item["key"] == "keys" and mount["readOnly"]
    return volume["secretName"], f"{mount['mountPath']}/{item['path']}"


def test_the_operator_gets_exactly_the_settings_that_it_reads(objects: Objects) -> None:
    given = environment(objects)
    fields = {f"MEDHA_{field.name.upper()}" for field in msgspec.structs.fields(Settings)}
    assert set(given) == fields - {"MEDHA_OPS_HOST"}  # every address of its pod
    settings = from_environment(given)
    assert settings.worker_image == "localhost/medha-worker:dev"
    assert settings.router == "tcp://medha-router-fleet.medha-system.svc:7800"
    assert settings.namespaces == ()


def test_the_operators_values_reach_its_settings(render: Render) -> None:
    values = {
        "operator.namespaces": ["a", "b"],
        "operator.resyncSeconds": 12.5,
        "worker.image": f"r.example/w@{DIGEST}",
        "image.pullPolicy": "Never",
    }
    settings = from_environment(environment(render(values)))
    assert settings.namespaces == ("a", "b") and settings.resync_s == 12.5
    assert (settings.worker_image, settings.pull_policy) == (f"r.example/w@{DIGEST}", "Never")


def test_the_release_owns_the_objects_that_the_operator_fills_in(objects: Objects) -> None:
    assert "data" not in select(objects, "Secret", FLEET_KEYS)
    assert "spec" not in select(objects, "Lease", LEASE)


def test_images_come_from_the_registry_unless_a_component_names_its_own(render: Render) -> None:
    rendered = render(
        {
            "image": {"registry": "r.example/medha", "tag": "1.2"},
            "router.image": f"other/router@{DIGEST}",
            "image.pullSecrets": ["one", "two"],
        }
    )
    specs = pod_specs(rendered)
    images = {name: spec["containers"][0]["image"] for name, spec in specs.items()}
    assert images == {
        "medha-operator": "r.example/medha/medha-operator:1.2",
        "medha-router": f"other/router@{DIGEST}",
        "medha-test": f"other/router@{DIGEST}",
    }
    for spec in specs.values():
        assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


def test_selectors_choose_their_own_pods_and_no_others(render: Render) -> None:
    objects = render({"router.podLabels": {"a": "b"}, "operator.podLabels": {"c": "d"}})
    pods = {
        name: template(objects, name)["metadata"]["labels"]
        for name in ("medha-operator", "medha-router")
    }
    pods["medha-test"] = select(objects, "Pod", "medha-test")["metadata"]["labels"]
    for document in objects:
        selector = document.get("spec", {}).get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        chosen = {name for name, labels in pods.items() if wanted.items() <= labels.items()}
        (owner,) = chosen
        assert document["metadata"]["name"].startswith(owner)


def test_every_probe_and_service_names_a_port_that_its_pod_has(objects: Objects) -> None:
    for name in ("medha-operator", "medha-router"):
        (container,) = template(objects, name)["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        for document in objects:
            if document["kind"] == "Service" and document["metadata"]["name"].startswith(name):
                assert {port["targetPort"] for port in document["spec"]["ports"]} <= ports


def test_no_pod_has_more_rights_than_it_needs(objects: Objects) -> None:
    for name, spec in pod_specs(objects).items():
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["enableServiceLinks"] is False
        assert spec.get("automountServiceAccountToken", True) is (name == "medha-operator")
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} == set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


def test_a_route_is_rendered_on_request_if_the_cluster_has_gateways(
    render: Render,
) -> None:
    wanted = {
        "router.httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "hostnames": ["llm.example.com"],
        }
    }
    assert "HTTPRoute" not in kinds(render(wanted)) | kinds(render(apis=GATEWAY))
    route = select(render(wanted, apis=GATEWAY), "HTTPRoute", "medha-router")["spec"]
    assert route["parentRefs"] == [{"name": "public"}]
    assert route["hostnames"] == ["llm.example.com"]
    assert route["rules"][0]["backendRefs"] == [{"name": "medha-router", "port": 8000}]


def test_an_ingress_is_rendered_on_request(render: Render) -> None:
    assert "Ingress" not in kinds(render())
    wanted = {"enabled": True, "host": "llm.example.com", "tlsSecret": "cert", "className": "nginx"}
    spec = select(render({"router.ingress": wanted}), "Ingress", "medha-router")["spec"]
    assert spec["tls"] == [{"hosts": ["llm.example.com"], "secretName": "cert"}]
    assert spec["ingressClassName"] == "nginx"


def test_a_service_of_another_type_keeps_its_port(render: Render) -> None:
    values = {"router.service": {"type": "NodePort", "port": 80, "nodePort": 30080}}
    spec = select(render(values), "Service", "medha-router")["spec"]
    assert spec["type"] == "NodePort"
    assert spec["ports"] == [{"name": "http", "port": 80, "targetPort": "http", "nodePort": 30080}]


def test_a_node_drain_evicts_one_router_at_a_time_and_never_blocks(objects: Objects) -> None:
    budget = select(objects, "PodDisruptionBudget", "medha-router")["spec"]
    assert budget["maxUnavailable"] == 1 and "minAvailable" not in budget


def test_objects_of_another_release_have_other_names(objects: Objects, render: Render) -> None:
    shared = {("Secret", FLEET_KEYS), ("Lease", LEASE)}  # the operator finds them by name
    names = [
        {(document["kind"], document["metadata"]["name"]) for document in rendered} - shared
        for rendered in (objects, render(release="prod"))
    ]
    assert not names[0] & names[1]
    assert all("prod-medha" in name for _, name in names[1])


def test_pods_are_scheduled_as_the_values_say(render: Render) -> None:
    values = {
        "nodeSelector": {"pool": "web"},
        "tolerations": [{"key": "web"}],
        "priorityClassName": "high",
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
    }
    for name in ("operator", "router"):
        rendered = render({f"{name}.{key}": value for key, value in values.items()})
        pod = template(rendered, f"medha-{name}")
        given = {key: pod["spec"][key] for key in values if key in pod["spec"]}
        lost, given["tolerations"] = given["tolerations"][:2], given["tolerations"][2:]
        assert all(
            toleration["tolerationSeconds"] < 15 for toleration in lost
        )  # away from a silent node soon
        assert given == {key: value for key, value in values.items() if key != "podAnnotations"}
        assert pod["metadata"]["annotations"]["a"] == "b"


@pytest.mark.parametrize("name", ["operator", "router"])
def test_copies_prefer_other_nodes_and_other_zones(name: str, objects: Objects) -> None:
    pod = template(objects, f"medha-{name}")
    terms = pod["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    for term in terms:
        selector = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert selector.items() <= pod["metadata"]["labels"].items()
    weights = {term["podAffinityTerm"]["topologyKey"]: term["weight"] for term in terms}
    assert weights == {"kubernetes.io/hostname": 100, "topology.kubernetes.io/zone": 50}
