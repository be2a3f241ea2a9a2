"""See ../__init__.py."""

from tests.engines.trtllm.stand_in import RequestError as RequestError
