"""The engine behind OpenAI's HTTP API."""
