"""Imported before all else by the process from which ranks fork: nothing there may ask torch for the number of GPUs.

torch gives none to a process that was forked later. deepspeed asks as it is imported; ranks get torch's own answer.
"""

import os

import torch

_asked = torch._C._cuda_getDeviceCount


def _answer() -> None:
    torch._C._cuda_getDeviceCount = _asked


torch._C._cuda_getDeviceCount = lambda: 1
os.register_at_fork(after_in_child=_answer)
