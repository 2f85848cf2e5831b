"""How workers and routers find each other: one registry seam (``base``) over etcd, a directory, or memory."""
