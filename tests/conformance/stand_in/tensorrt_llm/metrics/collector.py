"""See ../__init__.py."""

from tests.engines.trtllm.stand_in_metrics import MetricsCollector as MetricsCollector
