"""Builds the images of the Dockerfile with what this machine has: docker, podman or buildah.

    make images                                          all three, as localhost/medha-*:dev
    python -m examples.images --device cpu worker        one of them

The base image is $MEDHA_BASE_IMAGE, and what compiles the kernels $MEDHA_BUILDER_IMAGE, the
same with compilers of C and C++; else they are the Dockerfile's own, and buildah, which may lack a
registry, gets some that tests/cluster/base_image.sh makes. The package index is pip's own: its
settings and the certificate that it trusts are handed on as build secrets, and stay out of the
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

from medha.cli.children import bound

HOUSE = pathlib.Path(__file__).resolve().parents[1]
TARGETS = ("operator", "router", "worker")
BUILDERS = {"docker": ("buildx", "ls"), "buildah": ("info",), "podman": ("info",)}
"""In this order, and what one answers without an error where it can build."""
BASES = {"BASE": (), "BUILDER": ("gcc", "g++", "libc6-dev")}
"""What images start from, by the Dockerfile's name, and what Debian's Python lacks to be it."""
PIP_SETTINGS = pathlib.Path("/etc/pip.conf")
BASE_SCRIPT = HOUSE / "tests" / "cluster" / "base_image.sh"
OUT_OF_REACH = (
    "No matching distribution found", "NewConnectionError", "name resolution", "Read timed out",
    "Connection reset by peer", "No space left on device",
)  # fmt: skip
"""Words of a build that failed for what this machine lacks, whatever is built."""


ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A builder that is killed leaves its mounts and what it runs behind, except in a namespace."""


class Unreachable(Exception):
    """An image needs something that this machine cannot get; the sentence says what."""


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


def missing() -> str:
    """What this machine lacks to build the images; empty when nothing is known to."""
    program = able_builder()
    if program is None:
        return f"nothing here builds images: install one of {', '.join(BUILDERS)}"
    if program != "buildah" or shutil.which("debootstrap"):
        return ""
    lacking = [name for name in BASES if not given_base(name) and not _built(image(name.lower()))]
    return f"debootstrap is missing, for {' and '.join(lacking)} of the images" if lacking else ""


def builder() -> str:
    """The program that builds images here; raises Unreachable when there is none."""
    if lacking := missing():
        raise Unreachable(lacking)
    return str(able_builder())


def given_base(name: str) -> str | None:
    """What a person wants one of BASES to be."""
    return os.environ.get(f"MEDHA_{name}_IMAGE")


def build(target: str, device: str) -> str:
    """Build one image, from what earlier builds left where nothing changed; returns its name.

    Raises Unreachable for what this machine cannot get; ends the program with what a build that
    fails for another reason said last.
    """
    program = builder()
    verb = ["bud", "--isolation", "chroot", "--layers"] if program == "buildah" else ["build"]
    needed = BASES if target == "worker" else ("BASE",)
    found = {name: given_base(name) for name in needed}
    if program == "buildah":
        found = {name: given or own_base(name) for name, given in found.items()}
    arguments = {"DEVICE": device} | {name: given for name, given in found.items() if given}
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command = [program, *verb, *given, *secrets(), "--target", target, "-t", image(target), "."]
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    done = subprocess.run(
        alone(*command), cwd=HOUSE, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        said = done.stdout + done.stderr
        if found_words := [words for words in OUT_OF_REACH if words in said]:
            raise Unreachable(f"{image(target)} is not built: {found_words[0]}")
        sys.exit(f"{image(target)} is not built:\n{said[-4000:]}")
    return image(target)


def own_base(name: str) -> str:
    """One of BASES that is made here, if it is not there yet."""
    made = image(name.lower())
    if not _built(made):
        done = subprocess.run(
            alone(str(BASE_SCRIPT), made, *BASES[name]), capture_output=True, text=True
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise Unreachable(f"{made}, the base of the images, is not made: {said[-2000:]}")
    return made


def alone(*command: str) -> list[str]:
    """The same command, which ends with us, and with it all that it started and mounted."""
    return bound(*ALONE, *command) if _can_be_alone() else bound(*command)


@functools.cache
def _can_be_alone() -> bool:
    """Whether this machine has such namespaces, and lets us make them."""
    found = shutil.which(ALONE[0]) is not None and os.geteuid() == 0
    return found and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


def _built(name: str) -> bool:
    return subprocess.run(["buildah", "inspect", name], capture_output=True).returncode == 0


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
        subprocess.run(bound(program, "save", "-o", str(path), name), check=True)
    else:
        # Compressed, since every node keeps the file beside what it unpacks. Without a name in it:
        # whoever loads it says the name.
        subprocess.run(
            bound(program, "push", "-q", "--compression-format", "zstd", "--compression-level", "1",
                  name, f"oci-archive:{path}"), check=True, capture_output=True,
        )  # fmt: skip
    mark.write_text(shown.stdout)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.images", description=__doc__)
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
