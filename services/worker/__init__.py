"""The worker: an engine on the bus. Takes legs, acks them, turns the engine's events into frames, reports load."""
