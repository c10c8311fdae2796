"""Find and create plug-ins by name.

A plug-in is a module (or folder) in a plug-in folder; its file name is its configured name. It offers
`Options`, a pydantic model of its settings, and `create(options, …)`. Other packages add plug-ins under
the entry-point group of the folder, e.g. `paddock.verifiers`.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from shared.errors import ConfigurationProblem, unknown_name


@cache
def _installed(group: str) -> EntryPoints:
    """A group's entry points. Reading them takes 10 to 20 ms, and what is installed does not change while we run."""
    return entry_points(group=group)


@dataclass(frozen=True, slots=True)
class PluginFolder:
    """A package whose modules are plug-ins of one kind; `kind` is the word that people know it by."""

    package: str
    kind: str

    @property
    def group(self) -> str:
        return f"paddock.{self.package.rpartition('.')[2]}"

    def names(self) -> list[str]:
        """All plug-ins that can be had, sorted."""
        package = importlib.import_module(self.package)
        found = {module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")}
        return sorted(found | {entry.name for entry in _installed(self.group)})

    def module(self, name: str) -> ModuleType:
        """The plug-in's module.

        Raises:
            LookupError: there is none of that name; the message gives the known names and the nearest.
        """
        for entry in _installed(self.group):
            if entry.name == name:
                return importlib.import_module(entry.value)
        if name not in self.names():
            raise LookupError(unknown_name(self.kind, name, self.names()))
        return importlib.import_module(f"{self.package}.{name}")

    def options(self, name: str, values: Mapping[str, Any]) -> BaseModel:
        """The plug-in's options, checked.

        Raises:
            LookupError: there is no such plug-in.
            ValidationError: the options do not fit.
        """
        model: type[BaseModel] = self.module(name).Options
        return model.model_validate(dict(values))

    def check(self, name: str, values: Mapping[str, Any], *, source: str, key: str) -> list[ConfigurationProblem]:
        """What is wrong with a configured use of a plug-in; empty when nothing is."""
        try:
            self.options(name, values)
        except LookupError as error:
            return [ConfigurationProblem(source, key, str(error))]
        except ValidationError as error:
            return [
                ConfigurationProblem(
                    source,
                    ".".join([key, *(str(part) for part in item["loc"])]),
                    item["msg"].removeprefix("Value error, "),
                )
                for item in error.errors(include_url=False)
            ]
        return []
