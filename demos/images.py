"""Build the images of the Dockerfile with docker, podman or buildah.

    make images                                          all three, as localhost/medha-*:dev
    python -m demos.images --device cpu worker        one of them

$MEDHA_BASE_IMAGE names the base image, $MEDHA_BUILDER_IMAGE the same with C and C++ compilers. The
defaults are the Dockerfile's; for buildah, which may lack a registry, tests/cluster/base_image.sh
builds both. Builds use pip's settings and certificate as build secrets, which stay out of the
images.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shutil
import subprocess
import sys

from medha.cli.local_fleet.child_process import killed_with_parent

ROOT = pathlib.Path(__file__).resolve().parents[1]
TARGETS = ("operator", "router", "worker")
BUILDERS = {"docker": ("buildx", "ls"), "buildah": ("info",), "podman": ("info",)}
"""Builders in order of preference, each with a command that succeeds if it can build."""
BASES = {"BASE": (), "BUILDER": ("gcc", "g++", "libc6-dev")}
"""Base images by their name in the Dockerfile, with packages to add to Debian's Python."""
BASE_DIGEST = "org.opencontainers.image.base.digest"
"""Annotation with which an image names its base; buildah's own value is that of a cached layer."""
PIP_SETTINGS = pathlib.Path("/etc/pip.conf")
BASE_SCRIPT = ROOT / "tests" / "cluster" / "base_image.sh"
OUT_OF_REACH = (
    "No matching distribution found",
    "NewConnectionError",
    "name resolution",
    "Read timed out",
    "Connection reset by peer",
    "No space left on device",
)
"""Error texts of builds that fail because this machine lacks something."""


ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Namespace for a builder: without it, a killed builder leaves mounts and processes behind."""


class Unreachable(Exception):
    """An image needs something that this machine cannot get; the message names it."""


def image(target: str) -> str:
    """Name of an image."""
    return f"localhost/medha-{target}:dev"


def able_builder() -> str | None:
    """Program that builds images on this machine; None if none works."""
    if chosen := os.environ.get("MEDHA_IMAGE_BUILDER"):
        return chosen
    for program, question in BUILDERS.items():
        if shutil.which(program):
            probe = subprocess.run([program, *question], capture_output=True)
            if probe.returncode == 0:
                return program
    return None


def missing() -> str:
    """Reason why this machine cannot build the images; empty if none is known."""
    program = able_builder()
    if program is None:
        return f"nothing here builds images: install one of {', '.join(BUILDERS)}"
    if program != "buildah" or shutil.which("debootstrap"):
        return ""
    lacking = [name for name in BASES if not given_base(name) and not _built(image(name.lower()))]
    return f"debootstrap is missing, for {' and '.join(lacking)} of the images" if lacking else ""


def builder() -> str:
    """Program that builds images; raises Unreachable if there is none."""
    if lacking := missing():
        raise Unreachable(lacking)
    return str(able_builder())


def given_base(name: str) -> str | None:
    """Image that the user chose for one of BASES."""
    return os.environ.get(f"MEDHA_{name}_IMAGE")


def build(target: str, device: str) -> str:
    """Build an image, reusing cached layers; returns its name.

    Raises Unreachable if this machine lacks something; exits with the build's last output if it
    fails for another reason.
    """
    program = builder()
    verb = ["bud", "--isolation", "chroot", "--layers"] if program == "buildah" else ["build"]
    needed = ("BASE",) if target == "operator" else BASES
    bases = {name: given_base(name) for name in needed}
    if program == "buildah":
        bases = {name: given or own_base(name) for name, given in bases.items()}
    arguments = {"DEVICE": device} | {name: given for name, given in bases.items() if given}
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    if program != "docker" and "@" in (base := arguments.get("BASE", "")):
        given.append(f"--annotation={BASE_DIGEST}={base.partition('@')[2]}")
    command = [program, *verb, *given, *secrets(), "--target", target, "-t", image(target), "."]
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    done = subprocess.run(
        alone(*command), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        output = done.stdout + done.stderr
        if found_words := [words for words in OUT_OF_REACH if words in output]:
            raise Unreachable(f"{image(target)} is not built: {found_words[0]}")
        sys.exit(f"{image(target)} is not built:\n{output[-4000:]}")
    return image(target)


def own_base(name: str) -> str:
    """Build one of BASES on this machine unless it exists; returns its name by digest."""
    base = image(name.lower())
    if not _built(base):
        done = subprocess.run(
            alone(str(BASE_SCRIPT), base, *BASES[name]), capture_output=True, text=True
        )
        if done.returncode:
            output = (done.stderr or done.stdout).strip()
            raise Unreachable(f"{base}, the base of the images, is not built: {output[-2000:]}")
    command = ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageDigest}}", base]
    digest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return f"{base.rpartition(':')[0]}@{digest}"


def alone(*command: str) -> list[str]:
    """Wrap a command so that its processes and mounts end with this process."""
    return killed_with_parent(*ALONE, *command) if _can_be_alone() else killed_with_parent(*command)


@functools.cache
def _can_be_alone() -> bool:
    """True if this machine supports such namespaces and this user may create them."""
    available = shutil.which(ALONE[0]) is not None and os.geteuid() == 0
    return available and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


def _built(name: str) -> bool:
    return subprocess.run(["buildah", "inspect", name], capture_output=True).returncode == 0


def secrets() -> list[str]:
    files = {"pip_conf": PIP_SETTINGS, "pip_cert": pathlib.Path(os.environ.get("PIP_CERT", ""))}
    return [f"--secret=id={name},src={path}" for name, path in files.items() if path.is_file()]


def archive(target: str, folder: pathlib.Path) -> pathlib.Path:
    """Write the image as a file for a cluster's nodes, only if it changed."""
    program, name = builder(), image(target)
    shown = subprocess.run(
        [
            program,
            "inspect",
            "--format",
            "{{.FromImageID}}" if program == "buildah" else "{{.Id}}",
            name,
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / f"{target}.tar", folder / f"{target}.id"
    if path.exists() and mark.exists() and mark.read_text() == shown.stdout:
        return path
    path.unlink(missing_ok=True)
    if program == "docker":
        subprocess.run(killed_with_parent(program, "save", "-o", str(path), name), check=True)
    else:
        # Compressed, since every node keeps the file together with what it unpacks. Without a
        # name: the loader sets it.
        subprocess.run(
            killed_with_parent(
                program,
                "push",
                "-q",
                "--compression-format",
                "zstd",
                "--compression-level",
                "1",
                name,
                f"oci-archive:{path}",
            ),
            check=True,
            capture_output=True,
        )
    mark.write_text(shown.stdout)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="demos.images", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    try:
        for target in arguments.targets:
            print(f"built {build(target, arguments.device)}", flush=True)
    except Unreachable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
