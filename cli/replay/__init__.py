"""Traces replayed in virtual time: the router's own policies before fleets of mock engines."""
