"""Builds the images of the Dockerfile with what this machine has: docker, podman or buildah.

    make images                                          all three, as localhost/medha-*:dev
    python -m examples.images --device cpu worker        one of them

The base image is $MEDHA_BASE_IMAGE, and what compiles the worker's kernel $MEDHA_BUILDER_IMAGE, the
same with a C compiler; else they are the Dockerfile's own, and buildah, which may lack a registry,
gets some that tests/cluster/base_image.sh makes. The package index is pip's own: its settings and
the certificate that it trusts are handed on as build secrets, and stay out of the images.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

HOUSE = pathlib.Path(__file__).resolve().parents[1]
TARGETS = ("operator", "router", "worker")
BUILDERS = {"docker": ("buildx", "ls"), "buildah": ("info",), "podman": ("info",)}
"""In this order, and what one answers without an error where it can build."""
BASES = {"BASE": (), "BUILDER": ("gcc", "libc6-dev")}
"""What images start from, by the Dockerfile's name, and what Debian's Python lacks to be it."""
PIP_SETTINGS = pathlib.Path("/etc/pip.conf")


def image(target: str) -> str:
    """The name under which it is built."""
    return f"localhost/medha-{target}:dev"


def able_builder() -> str | None:
    """The program that builds images here; None without one that works."""
    if chosen := os.environ.get("MEDHA_IMAGE_BUILDER"):
        return chosen
    for program, question in BUILDERS.items():
        if shutil.which(program):
            asked = subprocess.run([program, *question], capture_output=True)
            if asked.returncode == 0:
                return program
    return None


def builder() -> str:
    """The program that builds images here; ends this one when there is none."""
    found = able_builder()
    if found is None:
        sys.exit(f"nothing here builds images: {', '.join(BUILDERS)} are missing or not working")
    return found


def build(target: str, device: str) -> str:
    """Build one image, from what earlier builds left where nothing changed; returns its name."""
    program = builder()
    verb = ["bud", "--isolation", "chroot", "--layers"] if program == "buildah" else ["build"]
    needed = BASES if target == "worker" else ("BASE",)
    found = {name: os.environ.get(f"MEDHA_{name}_IMAGE") for name in needed}
    if program == "buildah":
        found = {name: given or own_base(name) for name, given in found.items()}
    arguments = {"DEVICE": device} | {name: given for name, given in found.items() if given}
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command = [program, *verb, *given, *secrets(), "--target", target, "-t", image(target), "."]
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    done = subprocess.run(command, cwd=HOUSE, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{image(target)} is not built:\n{(done.stdout + done.stderr)[-4000:]}")
    return image(target)


def own_base(name: str) -> str:
    """One of BASES that is made here, if it is not there yet."""
    made = image(name.lower())
    if subprocess.run(["buildah", "inspect", made], capture_output=True).returncode:
        script = HOUSE / "tests" / "cluster" / "base_image.sh"
        subprocess.run([str(script), made, *BASES[name]], check=True)
    return made


def secrets() -> list[str]:
    found = {"pip_conf": PIP_SETTINGS, "pip_cert": pathlib.Path(os.environ.get("PIP_CERT", ""))}
    return [f"--secret=id={name},src={path}" for name, path in found.items() if path.is_file()]


def archive(target: str, folder: pathlib.Path) -> pathlib.Path:
    """The image as a file that a cluster's nodes can load; made anew only when it changed."""
    program, name = builder(), image(target)
    shown = subprocess.run(
        [program, "inspect", "--format", "{{.FromImageID}}" if program == "buildah" else "{{.Id}}",
         name], check=True, capture_output=True, text=True,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / f"{target}.tar", folder / f"{target}.id"
    if path.exists() and mark.exists() and mark.read_text() == shown.stdout:
        return path
    path.unlink(missing_ok=True)
    if program == "docker":
        subprocess.run([program, "save", "-o", str(path), name], check=True)
    else:
        # Compressed, since every node keeps the file beside what it unpacks. Without a name in it:
        # whoever loads it says the name.
        subprocess.run(
            [program, "push", "-q", "--compression-format", "zstd", "--compression-level", "1",
             name, f"oci-archive:{path}"], check=True, capture_output=True,
        )  # fmt: skip
    mark.write_text(shown.stdout)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.images", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    for target in arguments.targets:
        print(f"built {build(target, arguments.device)}", flush=True)


if __name__ == "__main__":
    main()
