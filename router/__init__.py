"""The Router service: places every request and streams its answer."""
