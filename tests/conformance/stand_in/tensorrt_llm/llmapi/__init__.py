"""See ../__init__.py."""

from tests.engines.trtllm.stand_in import DisaggregatedParams as DisaggregatedParams
