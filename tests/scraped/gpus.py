"""Simulated DCGM exporter of a node's GPUs, on a loopback port.

Names and labels are those of NVIDIA's exporter with kubelet mapping; the numbers are made up. A GPU
belongs to a pod of the namespace `team`, another to a pod elsewhere, the third to no pod.
"""

from __future__ import annotations

import http.server
import threading

METRICS = {
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", 87),
    "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (in MiB).", 61440),
    "DCGM_FI_DEV_POWER_USAGE": ("Power draw (in W).", 412.5),
}
OWNERS = (("worker", "team", "llama-0-g0-s0"), ("main", "elsewhere", "other"), ("", "", ""))


def page(node: str) -> str:
    lines = []
    for name, (says, value) in METRICS.items():
        lines += [f"# HELP {name} {says}", f"# TYPE {name} gauge"]
        for gpu, (container, namespace, pod) in enumerate(OWNERS):
            labels = {
                "gpu": gpu,
                "UUID": f"GPU-{node}-{gpu}",
                "pci_bus_id": f"00000000:0{gpu}:00.0",
                "device": f"nvidia{gpu}",
                "modelName": "NVIDIA H100 80GB HBM3",
                "Hostname": node,
                "container": container,
                "namespace": namespace,
                "pod": pod,
            }
            shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
            lines.append(f"{name}{{{shown}}} {value - 10 * gpu}")
    return "\n".join(lines) + "\n"


class Exporter:
    """Serves from `__init__` to `close`."""

    def __init__(self, node: str) -> None:
        text = page(node).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """Log no scrapes."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(20)
        self._server.server_close()
