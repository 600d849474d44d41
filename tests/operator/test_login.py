"""Logins by kubeconfig: a field that is not supported is refused, never ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from medha.errors import SetupError
from medha_operator.kube.login import EXTRA, OFFICIAL, REFUSED, kubeconfigs, login
from medha_operator.kube.login import needs_official_client as needs

CREDENTIAL = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "kind": "ExecCredential",
    "status": {"token": "of-the-plugin"},
}


def kubeconfig(
    folder: Path,
    user: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    name: str = "config",
) -> Path:
    """Write a kubeconfig with one context; returns its path."""
    named = {"name": "test"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [named | {"cluster": {"server": "https://api:6443"} | (cluster or {})}],
        "users": [named | {"user": user or {}}],
        "contexts": [named | {"context": {"cluster": "test", "user": "test"}}],
    }
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def with_field(folder: Path, field: str) -> Path:
    """Write a kubeconfig with this field of the cluster or the user, next to a token."""
    if field in ("proxy-url", "tls-server-name"):
        return kubeconfig(folder, {"token": "t"}, {field: "http://proxy:3128"})
    return kubeconfig(folder, {"token": "t", field: {"command": "login"}})


@pytest.mark.parametrize("field", [*OFFICIAL, *REFUSED])
def test_a_field_without_support_is_refused_with_its_file_and_a_remedy(
    tmp_path: Path, field: str
) -> None:
    path = with_field(tmp_path, field)
    with pytest.raises(SetupError) as refusal:
        needs((path,), installed=False)
    message = str(refusal.value)
    assert message.startswith(f"{field} of ") and str(path) in message
    assert (EXTRA in message) == (field in OFFICIAL)
    assert "is not supported: " in message


def test_with_the_official_client_its_fields_are_left_to_it_and_others_still_refused(
    tmp_path: Path,
) -> None:
    assert all(needs((with_field(tmp_path, field),), installed=True) for field in OFFICIAL)
    for field in REFUSED:
        with pytest.raises(SetupError, match=field):
            needs((with_field(tmp_path, field),), installed=True)


def test_a_kubeconfig_with_a_token_or_a_certificate_needs_no_other_client(tmp_path: Path) -> None:
    certificate = {"client-certificate-data": "YQ==", "client-key-data": "YQ=="}
    for user in ({"token": "t"}, certificate, {}):
        assert needs((kubeconfig(tmp_path, user),), installed=False) is False


def test_fields_of_other_contexts_are_ignored_and_the_first_file_wins(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path, {"token": "t"})
    second = kubeconfig(tmp_path, {"exec": {"command": "login"}}, name="second")
    assert needs((first, second), installed=False) is False
    with pytest.raises(SetupError, match="second"):
        needs((second, first), installed=False)


def test_a_context_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("current-context: gone\n")
    with pytest.raises(SetupError, match="there is no context 'gone'"):
        needs((path,), installed=False)
    with pytest.raises(SetupError, match="cannot be read"):
        needs((tmp_path / "absent",), installed=False)


def test_several_files_may_be_named(tmp_path: Path) -> None:
    environ = {"KUBECONFIG": os.pathsep.join((str(tmp_path / "a"), "", "~/b"))}
    assert kubeconfigs(environ) == (tmp_path / "a", Path("~/b").expanduser())


# --- the official client --------------------------------------------------------------------------


def plugin(folder: Path, script: str) -> dict[str, Any]:
    """Write an exec plugin; returns the user that has it."""
    path = folder / "plugin"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    run = {"apiVersion": version, "command": str(path), "interactiveMode": "Never"}
    return {"exec": run}


def test_a_plugin_of_the_kubeconfig_gives_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = plugin(tmp_path, f"echo '{json.dumps(CREDENTIAL)}'")
    path = kubeconfig(tmp_path, user, {"proxy-url": "http://proxy:3128"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    connection = login()
    assert connection.as_http_headers() == {"Authorization": "Bearer of-the-plugin"}
    assert (connection.server, connection.proxy_url) == ("https://api:6443", "http://proxy:3128")


@pytest.mark.parametrize("script", ["exit 1", "echo '{}'"])
def test_a_plugin_that_fails_is_an_error_and_no_anonymous_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    path = kubeconfig(tmp_path, plugin(tmp_path, script))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(SetupError, match="neither a token nor a client certificate"):
        login()


def test_a_token_file_is_read_again_at_each_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, {"tokenFile": str(token)})))
    for value in ("first", "second"):
        token.write_text(value)
        assert login().as_http_headers() == {"Authorization": f"Bearer {value}"}
