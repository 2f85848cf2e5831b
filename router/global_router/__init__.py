"""The global router: one address over several pools, each of which is a namespace with routers of its own."""
