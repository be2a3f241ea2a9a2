"""SGLang's own Prometheus series: its processes write them into files of a folder that SGLang names at its start."""


def text() -> bytes:
    """Return the series as text, all processes' together; reads files."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return bytes(generate_latest(registry))
