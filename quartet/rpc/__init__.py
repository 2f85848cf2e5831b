"""gRPC plumbing for every server and client: servers, channels, errors, and who may call what."""
