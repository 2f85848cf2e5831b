"""gRPC plumbing for every server and client: servers, channels, errors, and which callers may call what."""
