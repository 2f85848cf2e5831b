"""The services: one package for each, and the launcher that starts a topology."""
