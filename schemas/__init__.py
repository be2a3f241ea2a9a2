"""What crosses the bus: frozen msgspec structs, their one codec and the error tree. Imports nothing of ours."""
