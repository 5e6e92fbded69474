"""Imported by the process from which ranks fork: Triton's compiler, asked less often, as its kernels do nothing here.

What differs in the alignment of arguments and in the sizes of blocks alone is one kernel, compiled once for its types
and the choices that it is told, down to the GPU's own code, by whichever rank needs it first.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tests.stand_in.build import held


def compile_less() -> None:
    """Do so in this process from now on."""
    kernel_type = importlib.import_module("triton.runtime.jit").JITFunction
    compile_one = kernel_type._do_compile
    made: dict[Any, Any] = {}

    def compile_for_any(
        kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, alignments: Any, *rest: Any
    ) -> Any:
        chosen = {place: value for place, value in constants.items() if type(value) is not int}
        wanted = kernel, device, str(signature), str(chosen), str(options)
        if wanted not in made:
            with held(Path(os.environ["TRITON_CACHE_DIR"]).with_suffix(".lock")):
                made[wanted] = compile_one(kernel, key, signature, device, constants, options, {}, *rest)
        kernel.device_caches[device][0][key] = made[wanted]
        return made[wanted]

    kernel_type._do_compile = compile_for_any


compile_less()
