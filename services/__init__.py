"""The deployables: one package per service, and the launcher that starts a topology."""
