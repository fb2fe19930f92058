"""What Python imports by itself at its start in processes that tests of a mutant start."""

from importlib import import_module

import_module("tools.mutants.finder").inherit()
