"""The client reads CA and client certificates again, as they are files that change."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import kopf
import pytest
from aiohttp import web

from medha.cli.local_fleet.preflight import free_ports
from medha_operator.kube.client import PODS, KubeClient


def certificate(folder: Path, name: str) -> None:
    """Write `name.crt`, which signs itself, and `name.key`; existing ones are replaced."""
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*words.split(), *files, *subject], check=True, capture_output=True)


@contextlib.asynccontextmanager
async def api_server(folder: Path, port: int) -> AsyncIterator[None]:
    """Serve with the certificate `server`, to clients that have the certificate `client`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "client.crt"))
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Pod"})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "localhost", port, ssl_context=context).start()
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("replaced", ["server", "client"])
def test_a_replaced_certificate_is_used_without_a_restart(tmp_path: Path, replaced: str) -> None:
    (port,) = free_ports("127.0.0.1", 1)

    def login() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(
            server=f"https://localhost:{port}",
            ca_path=tmp_path / "server.crt",
            certificate_path=tmp_path / "client.crt",
            private_key_path=tmp_path / "client.key",
        )

    async def scenario() -> None:
        for name in ("server", "client"):
            certificate(tmp_path, name)
        async with contextlib.AsyncExitStack() as stack:
            async with api_server(tmp_path, port):
                client = KubeClient(login, relogin_s=0.0)
                stack.push_async_callback(client.close)
                assert await client.get(PODS, "default", "pod")
            certificate(tmp_path, replaced)
            async with api_server(tmp_path, port):
                assert await client.get(PODS, "default", "pod")

    asyncio.run(scenario())
