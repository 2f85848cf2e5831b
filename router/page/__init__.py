"""The page at ``/`` of the HTTP port: the fleet as it is now, and a playground (docs/page.md)."""
