"""The models that this router serves: those of its config, of a file, and of its replicas.

A router that learns starts with none and takes the name, context limit and classes of a model from
the Hello of its replicas. The latest word counts, as a rolling update brings replicas with new
classes while the old ones still serve; the context limit is the least of those that serve. A model
that was learned is forgotten some time after its last replica left. The file, which the operator
publishes, names models that have no replica now but get one when somebody asks: requests for these
are held, and for how long no replica knows, so that the file says it while some serve, too. Of all
else it has the word while none is there. It is read again when it changes. `now` is an argument.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from medha.config import RouterModel
from medha.messages import Hello
from medha.request import SloClass
from medha_router.models import ServedModel


class Models(Mapping[str, ServedModel]):
    """Every served model by its name; `forget_s` after its last replica a learned one goes.
    `file` names more, and may not be there yet."""

    def __init__(
        self, configured: Iterable[RouterModel], forget_s: float, file: pathlib.Path | None = None
    ) -> None:
        self._models = {model.name: ServedModel(model) for model in configured}
        self._configured = frozenset(self._models)
        self._forget_s = forget_s
        self._left_s: dict[str, float] = {}
        self._log = logging.getLogger("medha.router")
        self._file, self._version = file, (0, 0, 0)
        self._published: dict[str, RouterModel] = {}
        self.refresh()

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def learn(self, hello: Hello, others: bool) -> None:
        """A replica was taken in; `others`: it is not the only one of its model."""
        if hello.model in self._configured:
            return
        told = introduced(hello, self._hold_s(hello.model))
        model = self._models.get(hello.model)
        if model is None:
            self._models[hello.model] = ServedModel(told)
            self._log.info("serves %s from now on", hello.model)
            return
        if others and told.classes != model.config.classes:
            self._log.warning(
                "replica %s changes the classes of %s to %s: the latest word counts",
                hello.replica, hello.model, ", ".join(each.name for each in told.classes),
            )  # fmt: skip
        model.adopt(told, at_least=model.config.max_context_tokens if others else 0)

    def refresh(self) -> None:
        """Read the file again if it is another one by now; what does not decode changes nothing."""
        if self._file is None:
            return
        try:
            seen = self._file.stat()
            version = seen.st_mtime_ns, seen.st_ino, seen.st_size
            if version == self._version:
                return
            self._version = version
            models = msgspec.json.decode(self._file.read_bytes(), type=tuple[RouterModel, ...])
        except FileNotFoundError:
            return  # nothing is published yet
        except (OSError, msgspec.MsgspecError) as error:
            self._log.error("models of %s stay as they were: %s", self._file, error)
            return
        self._published = {each.name: each for each in models if each.name not in self._configured}
        for name, told in self._published.items():
            if name not in self._models:
                self._models[name] = ServedModel(told)
                self._log.info("serves %s from now on, as published", name)
        for name, model in self._models.items():
            if name not in self._configured:
                model.config = msgspec.structs.replace(model.config, hold_s=self._hold_s(name))

    def forget(self, served: frozenset[str], now: float) -> None:
        """Let go of learned models that no replica has served for long; `served` have replicas. Of
        those that are published what the file says counts again."""
        for name in [each for each in self._models if each not in self._configured]:
            model, told = self._models[name], self._published.get(name)
            if told is not None and name not in served and model.config != told:
                model.adopt(told, at_least=0)
            if name in served or told is not None or len(model.dispatch):
                self._left_s.pop(name, None)
            elif now - self._left_s.setdefault(name, now) > self._forget_s:
                del self._models[name], self._left_s[name]
                self._log.info("serves %s no more: no replica came back", name)

    def _hold_s(self, name: str) -> float:
        """How long requests wait for a first replica, which no replica can tell."""
        told = self._published.get(name)
        return told.hold_s if told is not None else 0.0


def introduced(hello: Hello, hold_s: float) -> RouterModel:
    """The model as a replica introduces it."""
    classes = hello.classes or (SloClass(),)
    names = [each.name for each in classes]
    return RouterModel(
        name=hello.model,
        max_context_tokens=hello.max_context_tokens,
        classes=classes,
        default_class="default" if "default" in names else names[0],
        hold_s=hold_s,
    )
