"""How workers and routers find each other: one registry seam (``base``) over etcd or a directory."""
