"""The front door: OpenAI's API in front of the queue. Needs the extra `gateway`."""
