"""The OpenAI API, over HTTP and over NATS: text in, token ids out to the bus, frames back in, text out."""
