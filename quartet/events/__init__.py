"""What workers publish over ZMQ, and how routers listen."""
