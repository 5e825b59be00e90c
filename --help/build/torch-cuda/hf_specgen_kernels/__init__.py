"""Stand in for the package one folder up, for older versions of the ``kernels`` library."""

import importlib.util
import sys
from pathlib import Path

_NAME = "_hf_specgen_kernels_cuda_9668dda"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "__init__.py")
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
globals().update({name: vars(sys.modules[_NAME])[name] for name in sys.modules[_NAME].__all__})
