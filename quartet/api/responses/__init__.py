"""OpenAI's API of responses: requests read, and answers written."""
