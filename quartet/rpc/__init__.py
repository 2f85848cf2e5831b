"""gRPC as all services and clients use it: servers, channels, errors, audiences, and proto to domain and back."""
