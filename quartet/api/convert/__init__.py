"""Domain to proto (``to_*``) and back (``from_*``) for what clients see."""
