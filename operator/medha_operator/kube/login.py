"""Address and credentials of the API server: from a kubeconfig, else of the pod's account.

kopf's own login ignores the fields of a kubeconfig that it does not know, and so would go on as
another user, or as none. Such fields are refused, unless the official client is installed
(`medha[kubernetes-login]`) and knows them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kopf
import msgspec
import yaml

from medha.errors import SetupError

EXTRA = "medha[kubernetes-login]"
OFFICIAL = ("exec", "auth-provider", "tokenFile", "proxy-url")
"""Fields that only the official client knows."""
_ANOTHER_USER = "name a user that has these rights itself"
REFUSED = {
    "as": _ANOTHER_USER,
    "as-uid": _ANOTHER_USER,
    "as-groups": _ANOTHER_USER,
    "as-user-extra": _ANOTHER_USER,
    "tls-server-name": "set an address that the server's certificate names",
}
"""Fields that no client knows, with the remedy."""


class Section(msgspec.Struct, frozen=True):
    """The cluster or the user of the current context: its fields, and the file that has it."""

    title: str
    fields: Mapping[str, Any]
    path: Path


def login() -> kopf.ConnectionInfo:
    """Read address and credentials. Read again at each call, since tokens and certificates rotate.

    Raises SetupError if there are none, or if the kubeconfig has a field that is not supported.
    """
    settings = kopf.OperatorSettings()
    paths = kubeconfigs(os.environ)
    if paths and needs_official_client(paths, _has_official_client()):
        return _login_with_official_client(paths)
    connection = kopf.login_with_kubeconfig(settings=settings)
    connection = connection or kopf.login_with_service_account(settings=settings)
    if connection is None:
        raise SetupError(
            "no Kubernetes API server is configured: set KUBECONFIG to a kubeconfig file, or run "
            "in a pod with a service account"
        )
    return connection


def kubeconfigs(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """List the files that $KUBECONFIG names, or the user's own if it exists."""
    if named := environ.get("KUBECONFIG"):
        names = [name.strip() for name in named.split(os.pathsep)]
        return tuple(Path(name).expanduser() for name in names if name)
    own = Path("~/.kube/config").expanduser()
    return (own,) if own.exists() else ()


def needs_official_client(paths: Sequence[Path], installed: bool) -> bool:
    """Return whether the current context has a field that only the official client knows.

    Raises SetupError for a field that no client here knows, and for a context that is not there.
    """
    needed = False
    for section in current_sections(paths):
        for field, value in section.fields.items():
            if not value or (field not in REFUSED and field not in OFFICIAL):
                continue
            remedy = REFUSED.get(field, f"install {EXTRA}, or set a token or a client certificate")
            if field in REFUSED or not installed:
                raise SetupError(
                    f"{field} of {section.title} in {section.path} is not supported: {remedy}"
                )
            needed = True
    return needed


def current_sections(paths: Sequence[Path]) -> tuple[Section, Section]:
    """Find cluster and user of the current context; the first file that has a name wins, as in
    kubectl. Raises SetupError if a file or a name is not there."""
    documents = [(path, _document(path)) for path in paths]
    names = [str(document.get("current-context") or "") for _, document in documents]
    name = next(filter(None, names), "")
    context = _section(documents, "context", name).fields
    cluster = _section(documents, "cluster", str(context.get("cluster") or ""))
    return cluster, _section(documents, "user", str(context.get("user") or ""))


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SetupError(
            f"kubeconfig {path} cannot be read ({error}): correct KUBECONFIG"
        ) from None
    return document if isinstance(document, dict) else {}


def _section(documents: Sequence[tuple[Path, Mapping[str, Any]]], kind: str, name: str) -> Section:
    for path, document in documents:
        for item in document.get(f"{kind}s") or ():
            if item.get("name") == name:
                return Section(f"{kind} {name!r}", item.get(kind) or {}, path)
    files = ", ".join(str(path) for path, _ in documents)
    raise SetupError(
        f"{files}: there is no {kind} {name!r}: set current-context to one that is there"
    )


def _has_official_client() -> bool:
    return importlib.util.find_spec("kubernetes") is not None


def _login_with_official_client(paths: Sequence[Path]) -> kopf.ConnectionInfo:
    """Log in as the official client does: it runs plugins, refreshes tokens and knows proxies."""
    import kubernetes.client
    import kubernetes.config

    configuration = kubernetes.client.Configuration()
    files = os.pathsep.join(map(str, paths))
    try:
        kubernetes.config.load_kube_config(files, client_configuration=configuration)
    except Exception as error:  # plugins and providers raise whatever they like
        raise SetupError(f"{files}: the login fails: {error}") from error
    header = configuration.get_api_key_with_prefix(
        "BearerToken"
    ) or configuration.get_api_key_with_prefix("authorization")
    if not header and not configuration.cert_file and not configuration.username:
        raise SetupError(
            f"{files}: the login yields neither a token nor a client certificate: correct exec or "
            "auth-provider of the current user"
        )
    scheme, _, token = header.rpartition(" ") if header else ("", "", "")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )
