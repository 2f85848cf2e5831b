"""Generation of stubs from the contracts in ``protos/``."""
