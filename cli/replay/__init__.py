"""``quartet replay``: replays traces in virtual time, with the router's own policies over fleets of mock engines."""
