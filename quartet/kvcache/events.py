"""What changes in the set of blocks that a pool could share; the same data crosses the wire."""

from quartet.events.kv import Cleared, KvEvent, Removed, Stored, Tier

__all__ = ["Cleared", "KvEvent", "Removed", "Stored", "Tier"]
