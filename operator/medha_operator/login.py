"""How the operator reaches its API server: a kubeconfig where there is one, else its own account.

kopf reads both; the same answer serves kopf's own watch and `client`.
"""

from __future__ import annotations

import kopf

from medha.errors import SetupError


def login() -> kopf.ConnectionInfo:
    """Address and credentials, read anew at each call, since tokens rotate; SetupError if none."""
    settings = kopf.OperatorSettings()
    found = kopf.login_with_kubeconfig(settings=settings)
    found = found or kopf.login_with_service_account(settings=settings)
    if found is None:
        raise SetupError(
            "no Kubernetes API server is known: set KUBECONFIG to a kubeconfig file, or run in a "
            "pod with a service account"
        )
    return found
