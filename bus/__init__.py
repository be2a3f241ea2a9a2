"""NATS, and nothing about LLMs beyond the messages of schemas: subjects, connection, streams, client, discovery."""
