"""See __init__.py."""

from tests.engines.trtllm.stand_in import DisaggScheduleStyle as DisaggScheduleStyle
