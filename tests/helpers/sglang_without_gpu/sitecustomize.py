"""Lets SGLang be imported without packages that its engines here do not need: on this path, they are empty.

Python imports this module by its name when it starts, so processes that SGLang spawns have it, too. A package that is
installed is not replaced, and any name that is read out of an empty one is a mock.
"""

import email.message
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from unittest.mock import MagicMock

PACKAGES = {"sgl_kernel", "flashinfer", "tilelang", "deep_gemm", "flash_attn", "quack", "cutlass", "torchao"}
PACKAGES |= {"torchvision", "soundfile", "IPython"}  # of images, sound and notebooks


class Empty(types.ModuleType):
    """A package in which every name is a mock."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Version(importlib.metadata.Distribution):
    """What is told of an empty package: a version below all that are asked for."""

    def __init__(self, name):
        self.name_of_it = name

    @property
    def metadata(self):
        told = email.message.Message()
        told["Name"], told["Version"] = self.name_of_it, "0"
        return told

    def read_text(self, filename):
        return None

    def locate_file(self, path):
        raise FileNotFoundError(path)


class Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds what no other finder has found."""

    def find_distributions(self, context=None):
        return iter([Version(context.name)] if context is not None and context.name == "torchvision" else [])

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
