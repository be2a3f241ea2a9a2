"""The parts of busway: gateway, router and worker (which never import one another), engines and KV transfer."""
