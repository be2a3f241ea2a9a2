"""A stand-in under TensorRT-LLM's names: **not TensorRT-LLM** (tests/engines/trtllm/stand_in.py says what it is).

On the PYTHONPATH of the conformance suite's `trtllm-stand-in` workers, so that services/engines/trtllm/api.py loads it
as it would load the library. KV goes from one process to the other by sockets.
"""

import functools

from tests.engines.trtllm import stand_in
from tests.engines.trtllm.socket_fabric import SocketFabric
from tests.engines.trtllm.stand_in_executor import Switches

__version__ = f"{stand_in.VERSION}+stand.in"

LLM = functools.partial(stand_in.StandInLlm, SocketFabric(), Switches())
SamplingParams = stand_in.SamplingParams
