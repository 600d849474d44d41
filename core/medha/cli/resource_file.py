"""Read MedhaReplicas from a YAML file; relative paths are relative to the file's folder."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import yaml

from medha.errors import SpecError
from medha.spec import CheckpointSource, MedhaReplica, parse_all


def read_resources(path: pathlib.Path) -> tuple[MedhaReplica, ...]:
    """Read every MedhaReplica of the file. Raises SpecError or UserErrors."""
    documents = read_documents(path, "-f", "name a file with a MedhaReplica")
    return tuple(_resolved(replica, path) for replica in parse_all(documents))


def read_documents(path: pathlib.Path, option: str, remedy: str) -> list[Any]:
    """Read all YAML documents of the file that `option` names. Raises SpecError."""
    try:
        return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SpecError(
            option, str(path), f"must be a file that can be read ({error.strerror})", remedy
        ) from None
    except UnicodeDecodeError:
        raise SpecError(option, str(path), "must be text in UTF-8", "save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise SpecError(
            option, str(path), f"must be YAML ({_first_fault(error)})", "fix that line"
        ) from None
    except RecursionError:
        raise SpecError(
            option, str(path), "must be YAML of a few levels, not thousands", "nest it less"
        ) from None


def _resolved(replica: MedhaReplica, file: pathlib.Path) -> MedhaReplica:
    replace, spec = msgspec.structs.replace, replica.spec
    model = replace(spec.model, source=_absolute(spec.model.source, file))
    adapters = tuple(
        replace(adapter, source=_absolute(adapter.source, file)) for adapter in spec.adapters
    )
    return replace(replica, spec=replace(spec, model=model, adapters=adapters))


def _absolute(source: CheckpointSource, file: pathlib.Path) -> CheckpointSource:
    """Return the source with the whole path of its folder, if it is on this machine."""
    if source.host_path is None:
        return source
    path = (file.resolve().parent / pathlib.Path(source.host_path.path).expanduser()).resolve()
    host_path = msgspec.structs.replace(source.host_path, path=str(path))
    return msgspec.structs.replace(source, host_path=host_path)


def _first_fault(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "invalid syntax"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)
