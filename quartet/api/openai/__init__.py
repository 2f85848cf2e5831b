"""OpenAI's requests to domain terms, and answers back: JSON values in and out, without HTTP."""
